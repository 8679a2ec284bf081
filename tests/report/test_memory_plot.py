"""Memory over time in a picture: the curves are those of the timelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.simulate.graphs import DEVICE, Layer, network

from overspill.core import Timeline
from overspill.core.errors import RequestError
from overspill.plans.plan import Plan, make_plan
from overspill.report.memory_plot import MemoryCurve, curve_of, plot_memory
from overspill.report.plan import limits_of
from overspill.report.plot import GIB

STEP = network([Layer(3 * 2**20) for _ in range(8)])


@pytest.fixture
def plan() -> Plan:
    return make_plan(STEP, DEVICE, "auto", 24 * 2**20)


def test_a_curve_holds_the_most_bytes_of_each_stretch_of_time() -> None:
    timeline = Timeline((), (), (1 * GIB, 5 * GIB, 2 * GIB, 1 * GIB), 3.0, (1.0, 1.0, 3.0, 3.0))
    assert curve_of(timeline, "it", "red") == MemoryCurve("it: 5.0 GiB", "red", (0.0, 1.0, 3.0), (1.0, 5.0, 1.0))


def test_the_peak_of_a_curve_is_the_peak_of_its_plan(plan: Plan) -> None:
    planned, unmanaged = (curve_of(t, "", "") for t in (plan.timeline, plan.unmanaged_timeline))
    assert max(planned.gib) * GIB == plan.peak_bytes
    assert max(unmanaged.gib) * GIB == plan.unmanaged_peak_bytes > plan.peak_bytes
    assert planned.seconds[-1] == plan.step_seconds


def test_a_plan_stays_below_its_budget_and_of_a_card_below_what_is_reserved(plan: Plan) -> None:
    assert limits_of(plan) == [("budget", 24 * 2**20)]
    card = replace(plan, reserved_bytes=22 * 2**20, device_bytes=25 * 2**20)
    assert limits_of(card) == [("budget less the context", card.most_live_bytes), ("reserved by PyTorch", 22 * 2**20)]


def test_it_is_drawn(plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    plot_memory(plan, path, "a step")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_page_is_what_the_report_is_for(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"in \.png; --report"):
        plot_memory(plan, tmp_path / "memory.html", "a step")


def test_a_file_that_cannot_be_written_is_one_line(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot write"):
        plot_memory(plan, tmp_path / "absent" / "memory.png", "a step")
