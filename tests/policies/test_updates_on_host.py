"""`auto` with updates on the host: its plans are valid, no slower than without, and faster where the link is slow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.policies.plans import seconds_of
from tests.simulate.graphs import DEVICE, Layer, devices, network, networks

from overspill.core import Device, Graph, LayerType, Phase, Schedule, Tensor, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.costs import op_seconds
from overspill.planning.effort import Effort
from overspill.planning.floor import floor_of
from overspill.planning.on_host import updates_of, without
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.policies import with_update, with_updates, without_update
from overspill.policies.auto import Auto
from overspill.simulate import check, simulate, trace_of

EXAMPLES = settings(max_examples=25, deadline=None)
QUICK = Effort(evaluations=2000, attempts_per_tensor=5)


def with_adam(graph: Graph) -> Graph:
    """The same step as one graph, in which each parameter has two states, and all may move."""
    tensors = [replace(t, movable=t.movable or t.kind is TensorKind.PARAMETER) for t in graph.tensors]
    ops = list(graph.ops)
    for op in graph.ops:
        if op.phase is Phase.UPDATE:
            (weight,) = op.writes
            state = []
            for name in ("exp_avg", "exp_avg_sq"):
                of = graph.tensors[weight]
                kind, called = TensorKind.OPTIMIZER_STATE, f"{of.name}.{name}"
                tensors.append(Tensor(len(tensors), of.nbytes, kind, called, of.shape, of.dtype, True, True))
                state.append(tensors[-1].id)
            ops[op.id] = replace(op, reads=(*op.reads, *state), writes=(weight, *state))
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops), whole_step=True)


def plan(update: str, graph: Graph, device: Device, budget: int) -> Schedule | None:
    """The quick plan of `update`, checked; None if there is none."""
    try:
        made = Auto(update=update, effort=QUICK).plan(graph, device, budget)
    except InfeasibleBudgetError:
        return None
    assert check(graph, made).peak_bytes <= budget
    return made


@given(networks().map(with_adam), devices(), st.sampled_from([1e5, 1e7, 1e9]), st.sampled_from([-0.1, 0.02, 0.2, 0.6]))
@EXAMPLES
def test_plans_with_updates_on_the_host_are_valid_and_auto_is_no_slower_than_either(
    graph: Graph, device: Device, rate: float, share: float
) -> None:
    """Below the floor of updates on the device there may be plans with updates on the host."""
    assume(updates_of(graph))
    device = replace(device, host_update_bytes_per_second=rate)
    floor, top = floor_of(StepProgram(graph)).nbytes, unmanaged_peak(graph, device)
    budget = max(1, floor + int(share * (top - floor)))
    on_device, on_host, best = (plan(update, graph, device, budget) for update in ("device", "host", "auto"))
    assert (best is None) == (on_device is None and on_host is None)
    for made in (on_host, best):
        if made is None:
            continue
        timeline = simulate(graph, made, device, op_seconds(graph, device))
        peak = check(graph, made).peak_bytes
        assert timeline.peak_bytes == trace_of(graph, made).lower_bound_bytes == peak
    if best is not None:
        others = (seconds_of(graph, made, device) for made in (on_device, on_host) if made is not None)
        assert seconds_of(graph, best, device) <= min(others) * (1 + 1e-9)


DEEP = with_adam(network([Layer(2000, LayerType.LINEAR, weight_bytes=16_000, flops=10**6) for _ in range(8)]))
FAST_HOST = replace(DEVICE, kind="cuda", host_update_bytes_per_second=1e8)


def tight(graph: Graph) -> int:
    floor = floor_of(StepProgram(graph)).nbytes
    return floor + (unmanaged_peak(graph, DEVICE) - floor) // 10


def moved_bytes(graph: Graph, made: Schedule, verb: Verb) -> int:
    return sum(graph.tensors[t].nbytes for t in made.targets(verb))


def test_over_a_slow_link_updates_on_the_host_move_less_and_are_faster() -> None:
    budget = tight(DEEP)
    on_device, on_host = (Auto(update=update).plan(DEEP, FAST_HOST, budget) for update in ("device", "host"))
    assert len(on_host.targets(Verb.RUN_ON_HOST)) == 8
    for verb in (Verb.OFFLOAD, Verb.PREFETCH):
        assert moved_bytes(DEEP, on_host, verb) < moved_bytes(DEEP, on_device, verb)
    assert seconds_of(DEEP, on_host, FAST_HOST) < 0.8 * seconds_of(DEEP, on_device, FAST_HOST)


@pytest.mark.parametrize("slow", [{"host_update_bytes_per_second": 1e4}, {"host_update_call_seconds": 10.0}])
def test_where_the_host_is_slow_auto_leaves_updates_on_the_device_and_searches_no_other_plan(
    slow: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    search = Auto._on_device
    monkeypatch.setattr(Auto, "_on_device", lambda *args: searched.append(args) or search(*args))
    made = Auto(update="auto").plan(DEEP, replace(FAST_HOST, **slow), tight(DEEP))
    assert not made.targets(Verb.RUN_ON_HOST)
    assert len(searched) == 1


def test_auto_gives_the_host_as_many_updates_as_it_has_time_for() -> None:
    device = replace(FAST_HOST, host_update_bytes_per_second=2e6)
    on_device, on_host, best = (plan(update, DEEP, device, tight(DEEP)) for update in ("device", "host", "auto"))
    assert on_device is not None
    assert on_host is not None
    assert best is not None
    assert 0 < len(best.targets(Verb.RUN_ON_HOST)) < len(on_host.targets(Verb.RUN_ON_HOST))
    others = (seconds_of(DEEP, made, device) for made in (on_device, on_host))
    assert seconds_of(DEEP, best, device) < 0.7 * min(others)


def test_below_the_floor_of_updates_on_the_device_the_host_still_updates() -> None:
    """An update on the device needs a weight, its gradient and two states at once: more than any op here."""
    floor = floor_of(StepProgram(DEEP)).nbytes
    with pytest.raises(InfeasibleBudgetError):
        Auto().plan(DEEP, FAST_HOST, floor - 1)
    made = Auto(update="host").plan(DEEP, FAST_HOST, floor - 1)
    assert check(DEEP, made).peak_bytes < floor


def test_no_plan_with_updates_on_the_host_beats_its_lower_bound() -> None:
    """The bound of the step on the device counts its updates, which take most of the time here."""
    graph = replace(DEEP, ops=tuple(replace(op, flops=10**9) if op.phase is Phase.UPDATE else op for op in DEEP.ops))
    on_device, on_host = (
        make_plan(graph, FAST_HOST, f"auto:update={where}", tight(graph)) for where in ("device", "host")
    )
    assert on_host.lower_bound_seconds <= on_host.step_seconds < on_device.lower_bound_seconds


def test_the_step_without_its_updates_has_no_state() -> None:
    rest, kept = without(DEEP, updates_of(DEEP))
    assert not rest.bytes_of(TensorKind.OPTIMIZER_STATE)
    assert [op.name for op in rest.ops] == [DEEP.ops[op].name for op in kept]
    assert rest.read_only == {t.id for t in DEEP.tensors if t.kind is TensorKind.PARAMETER}


@pytest.mark.parametrize(
    ("graph", "device", "said"),
    [
        (DEEP, DEVICE, "host_update_bytes_per_second"),
        (replace(network([Layer(1, weight_bytes=4)]), whole_step=True), FAST_HOST, "no update"),
    ],
)
def test_a_step_whose_updates_cannot_be_planned_on_the_host_is_refused_by_name(
    graph: Graph, device: Device, said: str
) -> None:
    with pytest.raises(RequestError, match=said):
        Auto(update="host").plan(graph, device, 10**9)


def test_where_updates_run_is_a_parameter_of_auto_alone() -> None:
    assert str(with_update("auto", "host")) == "auto:update=host"
    assert [*map(str, with_updates(("liveness", "auto"), "auto"))] == ["liveness", "auto:update=auto"]
    assert without_update("auto:update=auto") == ("auto", "auto")
    assert without_update("auto:memory,update=host,x=1") == ("auto:memory,x=1", "host")
    assert without_update("window:window=1GiB") == ("window:window=1GiB", "")
    for refused in (lambda: with_update("liveness", "host"), lambda: with_updates(("liveness",), "host")):
        with pytest.raises(RequestError, match="policy auto"):
            refused()
    with pytest.raises(RequestError, match="unknown update"):
        with_update("auto", "gpu")
