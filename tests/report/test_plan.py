"""A plan's report adds up, and shows names as they are."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise

import pytest
from rich.console import Console, RenderableType
from tests.simulate.graphs import DEVICE, Build, with_lines

from overspill.core import HOST, Graph, Phase, Stall, TensorKind, Timeline
from overspill.core.units import parse_bytes
from overspill.plans.plan import Plan, make_plan
from overspill.report.plan import peak_of, plan_page, plan_verdict, step_notes, waiting
from overspill.report.terminal import in_terminal


def shown(what: RenderableType, width: int = 120) -> str:
    """What a terminal of so many columns would show."""
    console = Console(width=width, force_terminal=False)
    with console.capture() as captured:
        console.print(what)
    return captured.get()


def step() -> Graph:
    """Two saved tensors, the first of which is far from its use, and scratch space in the middle."""
    build = Build()
    weight = build.tensor(8192, TensorKind.PARAMETER, "blocks[0].weight", persistent=True)
    far = build.tensor(65536, name="far [red]")
    near = build.tensor(32768, name="near")
    gradient = build.tensor(16384, TensorKind.TEMPORARY, "gradient")
    build.op((weight,), (far,))
    build.op((far,), (near,), workspace_bytes=4096)
    build.op((near,), (gradient,), Phase.BACKWARD, layer="head")
    build.op((gradient, far), (), Phase.BACKWARD)
    return build.graph()


def plan(budget_bytes: int = 1 << 20, policy: str = "liveness") -> Plan:
    return make_plan(step(), DEVICE, policy, budget_bytes)


def test_the_breakdown_of_the_peak_adds_up_to_the_peak() -> None:
    for policy in ("liveness", "in-core", "vdnn-all"):
        made = plan(policy=policy)
        assert sum(peak_of(made).by_kind.values()) == made.peak_bytes


def test_the_peak_names_its_op_and_its_largest_tensors_first() -> None:
    peak = peak_of(plan())
    assert peak.at == "op2 (head, backward)"
    assert [tensor.name for tensor in peak.largest] == ["far [red]", "near", "gradient", "blocks[0].weight"]
    assert list(peak.by_kind) == [TensorKind.ACTIVATION, TensorKind.TEMPORARY, TensorKind.PARAMETER]


def test_the_largest_tensors_are_told_with_their_lines_in_any_width() -> None:
    made = make_plan(with_lines(step(), "networks/a_long_name_for_a_model.py"), DEVICE, "liveness", 1 << 20)
    source = made.graph.source(0)
    assert source == "a_long_name_for_a_model.py:100 forward"
    for width in (120, 80, 50):
        told = shown(in_terminal(plan_page(made)), width)
        assert max(map(len, told.splitlines())) <= width
        assert "".join(source.split()) in "".join(told.split()) or "a_long_name_for_a_model.py:100" in told
    plain = shown(in_terminal(plan_page(plan())))
    assert " line" not in next(line for line in plain.splitlines() if line.startswith("tensor "))


@pytest.mark.parametrize(
    ("unmanaged", "said"),
    [
        (177, "Fits in 200 B: takes 183 B at most; without a plan 177 B, most likely"),
        (190, "Fits in 200 B: takes 183 B; without a plan 190 B"),
    ],
)
def test_a_card_for_more_than_the_likeliest_of_plain_training_is_the_most(unmanaged: int, said: str) -> None:
    made = replace(plan(), device_bytes=183, device_budget_bytes=200, unmanaged_device_bytes=unmanaged)
    assert plan_verdict(made).text == said


def test_scratch_space_counts_as_workspace() -> None:
    build = Build()
    made = build.tensor(4096)
    build.op((), (made,), workspace_bytes=1000)
    build.op((made,), (), Phase.BACKWARD)
    peak = peak_of(make_plan(build.graph(), DEVICE, "liveness", 1 << 20))
    assert peak.by_kind == {TensorKind.ACTIVATION: 4096, TensorKind.WORKSPACE: 1000}


def test_a_step_of_nothing_peaks_at_its_start() -> None:
    build = Build()
    build.tensor(4096, TensorKind.PARAMETER, persistent=True)
    assert peak_of(make_plan(build.graph(), DEVICE, "liveness", 1 << 20)).at == "the start of the step"


def test_the_report_shows_names_with_brackets_and_labels_times_as_simulated() -> None:
    made = plan()
    text = shown(in_terminal(plan_page(made, "toy [bold], batch 2", "portfolio"), "saved [green] somewhere"))
    assert "placed by portfolio" in text
    for part in ("far [red]", "blocks[0].weight", "toy [bold], batch 2", "saved [green] somewhere"):
        assert part in text
    assert "simulated step" in text
    assert "Times and memory are simulated, not measured." in text


def test_a_policy_whose_paper_moves_all_tensors_says_when_it_moves_feature_maps_alone() -> None:
    whole = replace(step(), whole_step=True)
    noted = [step_notes(make_plan(graph, DEVICE, "window:window=0", 1 << 20)) for graph in (step(), whole)]
    assert [note.startswith("window moves feature maps alone here") for (note,) in noted] == [True, False]
    assert not step_notes(plan())


def test_waiting_is_told_by_what_it_is_for() -> None:
    stalls = (Stall(0, 0.0, 0.002, HOST), Stall(1, 0.002, 0.005, "prefetch of a"))
    timeline = Timeline((), stalls, (), 1.0)
    assert timeline.host_seconds == pytest.approx(0.002)
    assert waiting(timeline) == "5.0 ms (for transfers 3.0 ms, for the host 2.0 ms)"
    gathers = Timeline((), (*stalls, Stall(2, 0.005, 0.009, "gather of b")), (), 1.0)
    assert waiting(gathers) == "9.0 ms (for transfers 3.0 ms, for the host 2.0 ms, for collectives 4.0 ms)"
    assert waiting(Timeline((), stalls[1:], (), 1.0)) == "3.0 ms for transfers"
    assert waiting(Timeline((), (), (), 1.0)) == "0 µs"


def test_the_host_memory_that_is_said_to_do_without_a_disk_can_be_typed_and_does() -> None:
    build = Build()
    made = [build.tensor(65536, name=f"saved{n}") for n in range(6)]
    for one, then in pairwise([None, *made]):
        build.op((one,) if one is not None else (), (then,))
    for one in reversed(made):
        build.op((one,), (), Phase.BACKWARD)
    graph = build.graph()
    disk = replace(DEVICE, host_bytes=131072, disk_read_bytes_per_second=1e5, disk_write_bytes_per_second=1e5)
    text = shown(in_terminal(plan_page(make_plan(graph, disk, "auto", 163840))), 160)
    found = re.search(r"--host-budget (\S+) for no disk at all", text)
    assert found
    assert re.search(r"\n +wear of the disk .*\n", text)
    ample = replace(disk, host_bytes=parse_bytes(found[1]))
    text = shown(in_terminal(plan_page(make_plan(graph, ample, "auto", 163840))), 160)
    assert "host memory" in text
    assert not re.search(r"\n +(disk|of the disk|wear) |\+disk", text)
