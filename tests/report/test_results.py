"""Each result as a page and in a notebook: what the page says is what the result has, and names stay text."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.simulate.graphs import DEVICE, Layer, network
from torch import nn

import overspill
from overspill.core import Block, Graph, LayerType, Trace, Verb
from overspill.core.errors import Amount, InfeasibleBudgetError, RequestError
from overspill.core.reportable import Reportable
from overspill.core.units import format_seconds
from overspill.estimation import Estimate
from overspill.plans.comparison import Comparison, Row, compare
from overspill.plans.plan import Plan, make_plan, unmanaged_peak
from overspill.plans.sweep import Sweep, sweep
from overspill.report.estimate import estimate_page
from overspill.report.listing import recomputed
from overspill.report.pack import pack_page
from overspill.report.page import Lines, Points, Step, Table
from overspill.report.plan import infeasible_page, longest_wait, plan_page, plan_verdict
from overspill.report.results import page_of
from overspill.report.snapshot import LEAST_HOLE_BYTES, _closed_up

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Six convolutions of 64 KiB, with a name that would be markup."""
    made = network([Layer(65536, LayerType.CONV, flops=10**8, weight_bytes=4096) for _ in range(6)], 65536)
    return replace(made, name=EVIL)


@pytest.fixture(scope="module")
def swept(graph: Graph) -> Sweep:
    return sweep(graph, DEVICE, ("auto", "vdnn-all"), 4)


@pytest.fixture(scope="module")
def compared(graph: Graph) -> Comparison:
    budget = int(0.8 * unmanaged_peak(graph, DEVICE))
    return Comparison(tuple(compare(graph, DEVICE, ("auto", "vdnn-all", "in-core"), budget)), DEVICE, budget)


@pytest.fixture(scope="module")
def planned(graph: Graph) -> Plan:
    return make_plan(graph, DEVICE, "auto", int(0.8 * unmanaged_peak(graph, DEVICE)))


@pytest.fixture(scope="module")
def estimated() -> Estimate:
    module = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
    batch = (torch.zeros(512, 64), torch.zeros(512, dtype=torch.long))
    made = overspill.estimate(module, batch, nn.CrossEntropyLoss(), "adam", device="t4")
    return replace(
        made, scaling=None, retrace=None
    )  # other batches and recipes, which would be traced, are others' tests


@pytest.fixture(scope="module")
def packed() -> Reportable:
    return overspill.pack(Trace((Block(0, 0, 4, 100, EVIL), Block(1, 2, 6, 50))))


def content_of(path: Path) -> dict[str, Any]:
    """What a page holds, as its script reads it."""
    found = re.search(
        r'<script type="application/json" id="content">(.*?)</script>', path.read_text("utf-8"), re.DOTALL
    )
    assert found is not None
    content = json.loads(found[1])
    assert isinstance(content, dict)
    return content


@pytest.mark.parametrize("name", ["swept", "compared", "planned", "estimated", "packed"])
def test_every_result_has_a_page_and_shows_itself_in_a_notebook(
    name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    result = request.getfixturevalue(name)
    result.report(tmp_path / "page.html", f"the title {EVIL}")
    content = content_of(tmp_path / "page.html")
    assert content["title"] == f"the title {EVIL}"
    assert content["sections"]
    assert content["verdict"]["text"]
    short = result._repr_html_()
    assert short.startswith("<div>")
    assert "<script" not in short
    assert "color" not in short  # the notebook's own, dark or light
    assert content["verdict"]["figures"][0]["value"] in short
    said = " ".join(result.explain().split())  # what the command prints is of the same page
    for figure in content["verdict"]["figures"]:
        assert f"{figure['label'].strip()} {figure['value']}" in said
    assert all(" ".join(note.split()) in said for note in content["notes"])
    assert all(table.title in said for table in page_of(result).tables)
    assert str(result).partition("\n")[0] == content["verdict"]["text"]
    for refused in ("page.pdf", "absent/page.html"):
        with pytest.raises(RequestError, match="cannot write"):
            result.report(tmp_path / refused)


def test_a_sweep_draws_its_points_and_the_bound_below_them(swept: Sweep) -> None:
    page = page_of(swept)
    chart, table = page.sections
    assert isinstance(chart, Points)
    assert [point.name for point in chart.points] == ["vdnn-all"]
    auto, bound = chart.curves
    own = [p.plan for p in swept.points if p.policy == "auto" and p.plan is not None]
    assert list(auto.y) == sorted((plan.step_seconds for plan in own), reverse=True)
    bounds = dict(zip(bound.x, bound.y, strict=True))
    assert all(bounds[x] <= y for x, y in zip(auto.x, auto.y, strict=True))
    assert isinstance(table, Table)
    assert len(table.rows) == len([p for p in swept.points if p.plan is not None])
    assert [note.split(": not below ")[0] for note in page.notes[-2:]] == ["auto", "vdnn-all"]


def test_a_sweep_of_one_curve_is_lines_alone(graph: Graph) -> None:
    chart = page_of(sweep(graph, DEVICE, ("auto",), 2)).sections[0]
    assert isinstance(chart, Lines)
    assert [curve.name for curve in chart.curves] == ["auto", "proven lower bound"]


@pytest.mark.long
def test_compared_policies_are_points_that_say_who_fits(compared: Comparison) -> None:
    chart, table = page_of(compared).sections
    assert isinstance(chart, Points)
    assert {point.name: point.good for point in chart.points} == {row.policy: row.fits for row in compared}
    assert chart.marks[0].at == compared.budget_bytes
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == [row.policy for row in compared]
    nothing = Comparison(tuple(row for row in compared if not row.fits), DEVICE, 10)
    page = page_of(nothing)
    assert page.verdict.good is False
    assert "would do" in page.verdict.text


def test_a_comparison_says_what_is_done_again_as_the_terminal_does_and_by_how_much_a_policy_is_over(
    graph: Graph,
) -> None:
    made = make_plan(graph, DEVICE, "checkpoint", 1 << 40)
    rows = (
        Row("again", made, fits=True, baseline_seconds=made.step_seconds),
        Row("over", None, fits=False, baseline_seconds=1.0, error="too small", floor_bytes=(2 << 30) + 7),
    )
    page = page_of(Comparison(rows, DEVICE, 2 << 30))
    table = page.sections[1]
    assert isinstance(table, Table)
    cells = [dict(zip((column.name for column in table.columns), row, strict=True)) for row in table.rows]
    assert made.recomputed_ops > 0
    assert cells[0]["recomputed"] == recomputed(made.recomputed_flops, made.recomputed_ops)
    assert [row["over the budget"] for row in cells] == [None, 7]
    assert [f.note for f in page.verdict.figures][-1].endswith("above it")
    assert "2147483655 bytes" in page_of(Comparison(rows[1:], DEVICE, 2 << 30)).verdict.text


def test_the_memory_of_an_estimate_over_its_step_peaks_where_the_estimate_does(estimated: Estimate) -> None:
    (step,) = (section for section in estimate_page(estimated).sections if isinstance(section, Step))
    (run,) = step.runs
    change = np.zeros(run.positions + 1, dtype=np.int64)
    np.add.at(change, run.start, run.nbytes)
    np.add.at(change, run.end, -run.nbytes)
    assert np.cumsum(change).max() == estimated.peak_requested_bytes
    assert len(step.tensors.name) == len(run.nbytes)
    assert {"parameter", "activation", "optimizer_state"} <= set(step.tensors.kind)
    assert step.tensors.maker.max() < len(step.ops.name)
    assert step.ops.first_read[-1] == len(step.ops.read)
    assert len(step.tensors.frame) == len(step.tensors.name)
    assert max(step.tensors.frame.max(), step.ops.frame.max(initial=-1)) < len(step.frames.function)


def test_the_tables_of_an_estimate_say_what_its_views_say(estimated: Estimate) -> None:
    sections = estimate_page(estimated).sections
    step = next(section for section in sections if isinstance(section, Step))
    made_of, layers = (
        next(s for s in sections if isinstance(s, Table) and s.title.startswith(title))
        for title in ("What it is made of", "Layers that hold")
    )
    *parts, (name, _, total, share) = made_of.rows
    assert (name, total, share) == ("total", estimated.total_bytes, 1)
    assert sum(int(row[2] or 0) for row in parts) == total
    assert {kind.replace("_", " ") for kind in step.tensors.kind} >= {"parameter", "activation", "optimizer state"}
    assert {"parameter", "activation", "optimizer state"} <= {row[1] for row in parts}
    run = step.runs[0]
    change = np.zeros(run.positions + 1, dtype=np.int64)
    np.add.at(change, run.start, run.nbytes)
    np.add.at(change, run.end, -run.nbytes)
    at = int(np.cumsum(change).argmax())
    there = (run.start <= at) & (at < run.end)
    in_views = {
        layer or "(outside layers)": int(run.nbytes[there & (step.tensors.layer[run.tensor] == number)].sum())
        for number, layer in enumerate(step.layers)
    }
    assert {row[0]: row[1] for row in layers.rows} == {layer: nbytes for layer, nbytes in in_views.items() if nbytes}
    assert in_views["0"] >= 4 * 64 * 128


def test_an_estimate_that_does_not_fit_says_what_would_help(estimated: Estimate) -> None:
    small = replace(estimated.device, memory_bytes=estimated.minimum_capacity_bytes - (1 << 20))
    page = page_of(estimated.on(small))
    assert page.verdict.good is False
    assert page.sections[0].title == "What would help: what fits, by cost, then what may"
    assert estimate_page(estimated, asked=False).verdict.good is None


def test_a_plan_that_does_not_exist_has_a_table_of_what_would_help() -> None:
    error = InfeasibleBudgetError(
        "infeasible: 5.0 GiB do not do",
        budget_bytes=5 << 30,
        floor_bytes=8703180800,
        cause="at least 4.2 GiB of live tensors: at relu",
        parts=(Amount("context", 344 << 20),),
        changes=(Amount('placement="planned"', 6 << 30),),
    )
    page = infeasible_page(error.with_help("; another model (the forward graph)"), "title", str.upper)
    assert [(f.label, f.value) for f in page.verdict.figures] == [
        ("the least that works", "8.1 GiB"),
        ("context", "344.0 MiB"),
    ]
    (table,) = page.sections
    assert isinstance(table, Table)
    assert table.rows == (('PLACEMENT="PLANNED"', 6 << 30), ("a card of that size", 8703180800))
    assert page.notes == ("ANOTHER MODEL (THE FORWARD GRAPH).",)


def test_a_plan_has_what_leaves_the_device_with_the_longest_waits_first(graph: Graph) -> None:
    plan = make_plan(graph, DEVICE, "vdnn-all", 1 << 40)
    found = {s.title: s for s in plan_page(plan, "a plan").sections if isinstance(s, Table)}
    table = found["What leaves the device, the longest waits first"]
    gone = set(plan.schedule.targets(Verb.OFFLOAD))
    assert {row[0] for row in table.rows} == {plan.graph.tensors[t].name for t in gone}
    waits = [row[5] for row in table.rows]
    assert waits == sorted(waits, reverse=True)
    assert sum(waits) == pytest.approx(plan.timeline.exposed_transfer_seconds - plan.timeline.host_seconds)
    for name, nbytes, _, leaves, returns, _ in table.rows:
        assert nbytes == next(t.nbytes for t in plan.graph.tensors if t.name == name)
        assert leaves < returns
    beside = {row[0]: row[1:] for row in found["Planned and unmanaged"].rows}
    assert beside["simulated step"] == (format_seconds(plan.step_seconds), format_seconds(plan.in_core_seconds))
    assert longest_wait(plan.timeline).endswith(
        f" for {max(plan.timeline.wait_seconds, key=plan.timeline.wait_seconds.__getitem__)}"
    )
    kept = plan_page(make_plan(graph, DEVICE, "liveness", 1 << 40), "all stays")
    assert not [s for s in kept.sections if s.title.startswith("What leaves the device")]


def test_figures_of_a_plan_are_in_words_that_fit_their_number(planned: Plan) -> None:
    verdict = plan_verdict(replace(planned, schedule=replace(planned.schedule, instructions=())))
    assert (verdict.figures[-1].label, verdict.figures[-1].note) == (
        "host memory",
        "0 tensors leave the device in each step",
    )
    figures = page_of(planned).tables[0]
    assert all(not re.search(r"\d%", str(cell)) for row in figures.rows for cell in row)


def test_a_packing_above_its_capacity_names_the_blocks_that_are_too_much() -> None:
    trace = Trace((Block(0, 0, 4, 8192, "a"), Block(1, 0, 4, 16384, "b"), Block(2, 4, 6, 1024, "c")))
    page = pack_page(overspill.pack(trace), trace, "title", 16 << 10)
    assert page.verdict.text == "Does not fit: takes 24.0 KiB of the 16.0 KiB, optimal, and no layout fits"
    table = page.sections[0]
    assert isinstance(table, Table)
    assert (table.title, [row[0] for row in table.rows]) == ("What cannot lie together", ["b", "a"])
    assert table.note == "24.0 KiB in all, of a capacity of 16.0 KiB."
    assert pack_page(overspill.pack(trace), trace, "title", 24 << 10).verdict.good
    assert "no layout" not in pack_page(overspill.pack(trace), trace, "title").verdict.text


def test_large_holes_between_segments_are_left_out_of_the_map_and_small_ones_are_not() -> None:
    trace = Trace((Block(0, 0, 1, 512), Block(1, 0, 1, 512), Block(2, 0, 1, 512)))
    far = 1000 * LEAST_HOLE_BYTES
    assert _closed_up(trace, (far + 4096, far, 3 * far)) == (4096, 0, 4096 + 512)
    assert _closed_up(Trace(()), ()) == ()
