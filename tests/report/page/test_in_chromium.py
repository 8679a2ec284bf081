"""The report in a real Chromium: it opens without a complaint, and its views move, filter and select together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.simulate.graphs import with_lines

from overspill.core import Block, Layout, Trace
from overspill.plans.plan import Plan, make_plan
from overspill.report.page import (
    Axis,
    Column,
    Curve,
    Lines,
    Mark,
    Page,
    Point,
    Points,
    Table,
    Unit,
    Verdict,
    write_page,
)  # fmt: skip
from overspill.report.page.step import addresses
from overspill.report.plan import plan_page

if TYPE_CHECKING:
    from .conftest import Browser

HOSTILE = "</script><script>window.harmed=1</script><img src=x onerror='window.harmed=1'>\"&\u202egnp.\u2028"


@pytest.fixture(scope="module")
def page(plan: Plan, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_page(path, plan_page(plan, "a step of eight layers"))
    return path


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    browser.open(page)
    return browser


def window(browser: Browser) -> tuple[float, float]:
    first, last = browser.find("div.step").get_attribute("data-window").split()
    return float(first), float(last)


def marked(browser: Browser) -> list[bool]:
    """For each view, whether anything stands on the glass above it."""
    return browser.run(
        "return [...document.querySelectorAll('.view canvas:last-child')].map((c) =>"
        " new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer).some((x) => x))"
    )


def test_it_opens_with_the_verdict_first_and_without_a_complaint(opened: Browser) -> None:
    assert opened.find(".sentence").text.startswith("✓Fits in 17.0 MiB")
    assert len(opened.all(".view")) == 3
    opened.shot("light")
    assert opened.complaints() == []


@pytest.mark.long
def test_pointing_at_memory_names_the_tensor_and_what_becomes_of_it(opened: Browser) -> None:
    view = opened.find(".view")
    x, y = 0, int(view.size["height"] / 2) - 4  # from its middle, almost at the bottom: the first parameter
    opened.actions.move_to_element_with_offset(view, x, y).perform()
    told = opened.find(".tooltip").text
    assert told.startswith("w0\nsize 512.0 KiB (524,288 bytes)\nkind parameter\nshape 131072 float32\nlayer l0")
    assert "updated by" in told
    assert marked(opened) == [True, True, True]


@pytest.mark.long
def test_dragging_zooms_all_views_and_a_double_click_shows_all(opened: Browser) -> None:
    before, whole = opened.pictures(), window(opened)
    view = opened.find(".view")
    opened.actions.move_to_element_with_offset(view, -100, 0).click_and_hold().move_by_offset(
        200, 0
    ).release().perform()
    opened.settle()
    first, last = window(opened)
    assert whole[0] < first < last < whole[1]
    assert all(now != then for now, then in zip(opened.pictures(), before, strict=True))
    opened.shot("zoomed")
    opened.actions.move_to_element(view).double_click().perform()
    opened.settle()
    assert window(opened) == whole


@pytest.mark.long
def test_a_layer_filters_all_views(opened: Browser) -> None:
    before = opened.pictures()
    opened.find(".tree [data-path='l3']").click()
    opened.settle()
    assert opened.find("div.step").get_attribute("data-filter") == "l3"
    assert all(now != then for now, then in zip(opened.pictures(), before, strict=True))
    opened.shot("filtered")
    opened.find(".crumb").click()
    opened.settle()
    assert opened.pictures() == before


@pytest.mark.long
def test_a_selected_tensor_stands_out_in_all_views(opened: Browser) -> None:
    assert marked(opened) == [False, False, False]
    opened.find(".instant .link").click()
    name = opened.find("div.step").get_attribute("data-selected")
    assert name == opened.find(".card h3").text == opened.find(".instant .link").text
    assert "made by" in opened.find(".history").text
    assert marked(opened) == [True, True, True]
    opened.shot("selected")


@pytest.mark.long
def test_what_is_drawn_lies_where_it_is_pointed_at(opened: Browser) -> None:
    drawn, shown = opened.run(
        "return [...document.querySelectorAll('.view')].map((v) => [v.lastChild.width / devicePixelRatio, v.clientWidth]).reduce("
        "([a, b], [c, d]) => [[...a, c], [...b, d]], [[], []])"
    )
    assert drawn == shown


@pytest.mark.long
def test_a_tensor_too_small_for_a_band_stands_out_too(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tensors = plan.graph.tensors
    small = replace(plan.graph, tensors=(*tensors[:-1], replace(tensors[-1], name="tiny", nbytes=1024)))
    path = tmp_path / "tiny.html"
    write_page(path, plan_page(make_plan(small, plan.device, "liveness", 1 << 40), "a step"))
    browser.open(path)
    browser.find(".search").send_keys("tiny")
    assert marked(browser)[0] is False
    browser.find(".instant .link").click()
    assert marked(browser)[0] is True


@pytest.mark.long
def test_who_presses_a_button_keeps_the_focus(opened: Browser) -> None:
    from selenium.webdriver import Keys

    for selector in (".choice button[data-value='layer']", ".instant .link"):
        opened.run("document.querySelector(arguments[0]).focus()", selector)
        name = opened.run("return document.activeElement.textContent")
        opened.actions.send_keys(Keys.ENTER).perform()
        opened.settle()
        assert opened.run("return document.activeElement.textContent") == name


@pytest.mark.long
def test_on_paper_the_views_are_not_hidden_by_their_glass(opened: Browser) -> None:
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    assert opened.run("return [...document.querySelectorAll('.view canvas + canvas')].every((c) => !c.offsetParent)")
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


@pytest.mark.long
def test_a_tensor_is_found_by_its_name(opened: Browser) -> None:
    opened.find(".search").send_keys("Y3")
    assert [button.text for button in opened.all(".instant .link")] == ["y3", "dy3"]
    opened.find(".instant .link").click()
    assert opened.find("div.step").get_attribute("data-selected") == "y3"
    assert marked(opened) == [True, True, True]


def test_a_selected_tensor_shows_its_line_and_the_whole_stack_and_is_found_by_it(opened: Browser, plan: Plan) -> None:
    graph = plan.graph
    tensor = next(t for t in graph.tensors if t.name == "y3")
    opened.find(".search").send_keys(str(graph.stacks(graph.producer[tensor.id])[0][-1].line))
    found = [button.text for button in opened.all(".instant .link")]
    assert found == ["y3", f"workspace of {graph.ops[graph.producer[tensor.id]].name}"]
    opened.find(".instant .link").click()
    source = graph.source(graph.producer[tensor.id])
    assert source.startswith("model.py:10")
    assert source in opened.find(".card dl").text
    assert [line.text for line in opened.all(".card .stack li")] == ["train.py:7 main", f"nets/{source}"]
    opened.shot("stack")
    assert opened.complaints() == []


@pytest.mark.long
def test_pointing_at_an_op_and_at_a_tensor_names_the_line(opened: Browser, plan: Plan) -> None:
    compute = opened.all(".view")[1]
    seen = set()
    for x in range(-300, 300, 60):
        opened.actions.move_to_element_with_offset(compute, x, round(10 - compute.size["height"] / 2)).perform()
        seen.add(opened.find(".tooltip").text)
    assert {line for told in seen for line in told.splitlines() if line.startswith("line ")} <= {
        f"line {plan.graph.source(op.id)}" for op in plan.graph.ops
    }
    assert any("line model.py:" in told for told in seen)
    assert any("line backward of model.py:" in told for told in seen)


@pytest.mark.long
def test_what_compute_waits_for_is_red_and_named(opened: Browser, plan: Plan) -> None:
    stall = max(plan.timeline.stalls, key=lambda found: found.end_seconds - found.start_seconds)
    view = opened.all(".view")[1]
    share = (stall.start_seconds + stall.end_seconds) / 2 / plan.step_seconds
    plot = view.size["width"] - 78 - 12  # between the labels and the margin
    x, y = 78 + share * plot - view.size["width"] / 2, view.size["height"] / 2 - 17  # in the last row
    opened.actions.move_to_element_with_offset(view, round(x), round(y)).perform()
    told = opened.find(".tooltip").text
    assert told.startswith("compute waits ")
    assert f"for {stall.cause}" in told
    opened.actions.click().perform()
    assert opened.find("div.step").get_attribute("data-selected") == stall.cause.partition(" of ")[2]


@pytest.mark.long
def test_runs_colours_and_axes_can_be_changed(opened: Browser) -> None:
    for value, group in (("layer", "Colours"), ("positions", "Axis"), ("1", "Run")):
        before = opened.pictures()[0]
        opened.find(f"[aria-label='{group}'] [data-value='{value}']").click()
        opened.settle()
        assert opened.pictures()[0] != before
    opened.shot("unmanaged")
    assert opened.complaints() == []


@pytest.mark.long
def test_the_theme_is_that_of_the_system_until_the_button_says_otherwise(opened: Browser) -> None:
    paper = "return getComputedStyle(document.body).backgroundColor"
    light, before = opened.run(paper), opened.pictures()[0]
    opened.find(".theme").click()
    dark = opened.run(paper)
    assert dark != light
    assert opened.pictures()[0] != before
    opened.shot("dark")
    opened.find(".theme").click()
    assert opened.run(paper) == light
    opened.driver.refresh()
    preference = [{"name": "prefers-color-scheme", "value": "dark"}]
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": preference})
    assert opened.run(paper) == dark
    opened.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.long
def test_a_telephone_need_not_scroll_sideways(browser: Browser, page: Path) -> None:
    browser.open(page, (390, 2600))
    assert browser.run("return [document.documentElement.scrollWidth, innerWidth]") == [390, 390]
    browser.shot("narrow")


@pytest.mark.long
def test_the_keyboard_moves_zooms_steps_and_clears(opened: Browser) -> None:
    from selenium.webdriver import Keys

    whole = window(opened)
    for _ in range(40):
        opened.actions.send_keys(Keys.TAB).perform()
        if "view" in (opened.driver.switch_to.active_element.get_attribute("class") or ""):
            break
    opened.actions.send_keys(Keys.ARROW_UP, Keys.ARROW_UP).perform()
    opened.settle()
    near = window(opened)
    assert near[1] - near[0] == pytest.approx((whole[1] - whole[0]) / 4)
    opened.actions.send_keys(Keys.ARROW_RIGHT).perform()
    opened.settle()
    assert window(opened)[0] > near[0]
    peak = opened.find(".instant h3").text
    opened.actions.send_keys(".", ".").perform()
    assert opened.find(".instant h3").text != peak
    opened.actions.send_keys(Keys.ESCAPE, Keys.HOME).perform()
    opened.settle()
    assert opened.find(".instant h3").text == peak
    assert window(opened) == whole


def test_names_are_shown_and_never_obeyed(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tensors = tuple(replace(t, name=HOSTILE + t.name) for t in plan.graph.tensors)
    ops = tuple(replace(op, name=HOSTILE, layer=f"{HOSTILE}.{op.layer}") for op in plan.graph.ops)
    graph = with_lines(replace(plan.graph, tensors=tensors, ops=ops), f"folder/{HOSTILE}.py", HOSTILE)
    hostile = replace(plan, graph=graph)
    write_page(tmp_path / "hostile.html", plan_page(hostile, HOSTILE))
    browser.open(tmp_path / "hostile.html")
    assert browser.complaints() == []
    assert browser.run("return [window.harmed, document.images.length]") == [None, 0]
    shown = HOSTILE.replace("\u202e", "\\u202e").replace("\u2028", "\\u2028")
    assert browser.find("h1").text == browser.driver.title == shown
    assert browser.find(".instant .link").text.startswith(shown)
    browser.find(".instant .link").click()
    *_, line = browser.all(".card .stack li")
    assert line.text.startswith(f"folder/{shown}.py:1")
    assert line.text.endswith(f" {shown}")
    browser.find(".search").send_keys("</script>")
    assert browser.run("return [window.harmed, document.images.length]") == [None, 0]


@pytest.mark.long
def test_tables_sort_and_charts_can_be_read(browser: Browser, tmp_path: Path) -> None:
    table = Table("t", (Column("name"), Column("size", Unit.BYTES, bar=True)), (("a", 10), ("b", 3000), ("c", None)))
    memory, slowdown = Axis("memory", Unit.BYTES), Axis("slowdown", Unit.RATIO)
    bound = Curve("bound", (1 << 20, 1 << 21), (1.2, 1.0), dashed=True)
    lines = Lines("curves", memory, slowdown, (bound, replace(bound, name="auto", dashed=False)))
    points = Points("policies", memory, slowdown, (Point("auto", 1 << 20, 1.25), Point("in-core", 1 << 22, 1, good=False)), (bound,), (Mark("budget", 3 << 20, on_x=True),))  # fmt: skip
    trace = Trace((Block(0, 0, 4, 4096, "a"), Block(1, 1, 3, 8192, "b", gaps=((2, 3),)), Block(2, 0, 2, 512, space=1)))
    layout = Layout("by hand", (0, 4096, 0), 12800, 12800)
    layout.validate(trace)
    sections = (table, lines, points, addresses(trace, layout, "a layout", 16384))
    write_page(tmp_path / "parts.html", Page("parts", Verdict("nothing is judged", None), sections, ("a note",)))
    browser.open(tmp_path / "parts.html")
    names = lambda: [cell.text for cell in browser.all(".table tbody th")]  # noqa: E731
    assert names() == ["a", "b", "c"]
    browser.all(".table thead button")[1].click()
    assert names() == ["b", "a", "c"]
    browser.actions.move_to_element(browser.all(".point")[0]).perform()
    assert browser.find(".tooltip").text == "auto\nmemory 1.0 MiB\nslowdown 1.250"
    assert len(browser.all(".view")) == 2
    browser.shot("parts")
    assert browser.complaints() == []


@pytest.mark.long
def test_a_long_table_shows_its_first_rows_until_all_are_asked_for_and_a_wide_one_stays_in_the_page(
    browser: Browser, tmp_path: Path
) -> None:
    rows = tuple((f"tensor {i}", *(float(i * 10**6 + j) for j in range(12))) for i in range(40))
    wide = Table("t", (Column("name"), *(Column("simulated step", Unit.BYTES) for _ in range(12))), rows)
    text = Table("u", (Column("change"), Column("cost")), (("less", "words " * 60), ("more", "")))
    write_page(tmp_path / "tables.html", Page("tables", Verdict("nothing is judged", None), (wide, text)))
    browser.open(tmp_path / "tables.html", (1280, 1200))
    spilling = "return [...document.querySelectorAll('.wide')].map((box) => box.scrollWidth - box.clientWidth)"
    assert browser.run(spilling) == [0, 0]
    first = browser.all(".table")[0]
    assert len(first.find_elements("css selector", "tbody tr")) == 15
    button = first.find_element("css selector", "button.more")
    assert button.text == "Show all 40"
    first.find_elements("css selector", "thead button")[1].click()  # sorts all, the largest first
    assert first.find_element("css selector", "tbody th").text == "tensor 39"
    button.click()
    assert len(first.find_elements("css selector", "tbody tr")) == 40
    assert first.find_elements("css selector", "button.more") == []


@pytest.mark.long
def test_names_of_points_that_lie_together_do_not_lie_upon_one_another(browser: Browser, tmp_path: Path) -> None:
    points = tuple(Point(f"policy-{i}", 100 + i % 2, 1 + i % 3 / 100, good=bool(i % 2)) for i in range(6))
    chart = Points("p", Axis("memory"), Axis("time"), points, marks=(Mark("budget", 101, on_x=True),))
    write_page(tmp_path / "points.html", Page("points", Verdict("nothing is judged", None), (chart,)))
    browser.open(tmp_path / "points.html")
    boxes = browser.run(
        "return [...document.querySelectorAll('svg text.name, svg text.mark')].map((t) => t.getBoundingClientRect())"
        ".map((b) => [b.left, b.top + 3, b.right, b.bottom - 3])"
    )
    assert len(boxes) == len(points) + 1
    for i, one in enumerate(boxes):
        for other in boxes[:i]:
            apart = one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]
            assert apart, (one, other)


@pytest.mark.long
def test_the_views_of_blocks_speak_of_blocks(browser: Browser, tmp_path: Path) -> None:
    trace = Trace((Block(0, 0, 4, 4096, "a"), Block(1, 1, 3, 8192, "b")))
    layout = Layout("by hand", (0, 4096), 12288, 12288)
    views = addresses(trace, layout, "a layout", position="event")
    write_page(tmp_path / "blocks.html", Page("blocks", Verdict("nothing is judged", None), (views,)))
    browser.open(tmp_path / "blocks.html")
    text = browser.find("body").text
    for words in ("Live bytes", "largest blocks", "At the peak, event 1: 12.0 KiB live", "Click a block in any view"):
        assert words in text
    for words in ("tensor", "on the device", "shape", "instr"):
        assert words not in text
    assert browser.find(".search").get_attribute("placeholder") == "Find a block"
