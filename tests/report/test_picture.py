"""Pictures of charts and views: files of their kind, curves that are those of the plan; and clear refusals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Block, Layout, Trace
from overspill.core.errors import RequestError
from overspill.plans.plan import Plan, make_plan
from overspill.report import picture
from overspill.report.page import Axis, Curve, Lines, Mark, Point, Points, Section, Unit
from overspill.report.page.step import addresses, step
from overspill.report.picture import check_plot, draw, memory_over_time

PNG = b"\x89PNG\r\n\x1a\n"
MEMORY, TIME = Axis("memory", Unit.BYTES), Axis("step", Unit.SECONDS)
KIB = 1 << 10
TRACE = Trace(
    (
        Block(0, 0, 4, 4 * KIB, "conv<1>"),
        Block(1, 2, 9, 8 * KIB, gaps=((4, 6),)),
        Block(2, 4, 6, 8 * KIB, "$x_{$"),
        Block(3, 3, 3, 8 * KIB, "no time"),
        Block(4, 0, 9, 0, "no bytes"),
    )
)
LAYOUT = Layout("by hand", (8 * KIB, 0, 0, 0, 0), 12 * KIB, 12 * KIB)
FEW = Points(
    "", MEMORY, TIME, (Point("auto", 1e9, 1.0), Point("liveness", 1.01e9, 1.01, good=False), Point("far", 2e9, 2.0)),
    (Curve("bound", [1e9, 2e9], [0.9, 0.9], dashed=True),), (Mark("budget", 1.5e9, on_x=True),),
)  # fmt: skip
SECTIONS = {
    "points": FEW,
    "no points": Points("", MEMORY, TIME, (), (), (Mark("budget", 1, on_x=True),)),
    "lines": Lines("", MEMORY, TIME, (Curve("auto", [1.0, 2.0], [3.0, 2.0], steps=True),)),
    "blocks": addresses(TRACE, LAYOUT, "", 14 * KIB),
    "no blocks": addresses(Trace(()), Layout("s", (), 0, 0), ""),
    "flat blocks": addresses(Trace(TRACE.blocks[3:]), Layout("s", (0, 0), 0, 0), ""),
    "spaces": addresses(Trace((Block(0, 0, 4, 100), Block(1, 2, 6, 50, space=3))), Layout("s", (0, 0), 100, 150), ""),
}


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(network([Layer(3 * 2**20) for _ in range(8)]), DEVICE, "auto", 24 * 2**20)


@pytest.mark.parametrize("section", SECTIONS.values(), ids=SECTIONS)
def test_every_chart_and_view_is_drawn(tmp_path: Path, section: Section) -> None:
    draw(section, tmp_path / "picture.PNG", "a <title> of $5_{" + "x" * 300)
    content = (tmp_path / "picture.PNG").read_bytes()
    assert content.startswith(PNG)
    assert len(content) > 5000


def test_memory_over_a_step_peaks_where_its_plan_does(plan: Plan, tmp_path: Path) -> None:
    views = step(plan)
    planned, unmanaged = map(memory_over_time, views.runs)
    assert planned[1].max() == plan.peak_bytes
    assert unmanaged[1].max() == plan.unmanaged_peak_bytes > plan.peak_bytes
    assert planned[0][-1] == plan.step_seconds
    assert np.all(np.diff(planned[0]) > 0)
    draw(views, tmp_path / "memory.png", "a step")
    assert (tmp_path / "memory.png").stat().st_size > 10_000


def test_very_many_blocks_stay_one_small_file(tmp_path: Path) -> None:
    sizes = [512 * (1 + i % 97) for i in range(8000)]
    ends = np.cumsum(sizes).tolist()
    trace = Trace(tuple(Block(i, i, i + 1 + i % 1000, size) for i, size in enumerate(sizes)))
    layout = Layout("stacked", (0, *ends[:-1]), ends[-1], trace.lower_bound_bytes)
    draw(addresses(trace, layout, ""), tmp_path / "many.png", "many")
    assert (tmp_path / "many.png").stat().st_size < 1 << 20


@pytest.mark.parametrize("name", ["picture.pdf", "picture.html", "picture", "png", "picture.png.gz"])
def test_another_ending_is_refused_with_what_would_do(name: str) -> None:
    with pytest.raises(RequestError, match=r"in \.png; --report"):
        check_plot(Path(name))


def test_a_missing_library_and_a_file_that_cannot_be_written_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        draw(FEW, tmp_path / "absent" / "picture.png", "")
    monkeypatch.setattr(picture, "find_spec", lambda _: None)
    with pytest.raises(RequestError, match=r"matplotlib: .*\[plot\]"):
        check_plot(Path("picture.png"))
