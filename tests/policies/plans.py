"""What a plan does and what must hold as its budget grows: shared by the tests of policies that plan for budgets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.simulate.graphs import Layer, network

from overspill.core import Algorithm, Device, Graph, LayerType, Schedule, TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.costs import op_seconds
from overspill.plans.plan import unmanaged_peak
from overspill.policies.base import Policy
from overspill.simulate import check, simulate

SHARES = (0.0, 0.03, 0.1, 0.25, 0.5, 0.75, 0.97, 1.0)


def floor_bytes(policy: Policy, graph: Graph, device: Device) -> int:
    """The least budget that `policy` says it can meet: what it answers to one that nobody can."""
    try:
        policy.plan(graph, device, 1)
    except InfeasibleBudgetError as error:
        return error.floor_bytes
    return 1


def seconds_of(graph: Graph, made: Schedule, device: Device) -> float:
    """The simulated seconds of one step."""
    return simulate(graph, made, device, op_seconds(graph, device)).step_seconds


def larger_budgets_are_kept_and_never_slower(policy: Policy, graph: Graph, device: Device) -> None:
    """From the floor to the peak without management: every budget is kept, and none is slower than a smaller one."""
    floor = floor_bytes(policy, graph, device)
    top = max(floor, unmanaged_peak(graph, device))
    before = float("inf")
    for share in SHARES:
        budget = floor + int(share * (top - floor))
        made = policy.plan(graph, device, budget)
        assert check(graph, made).peak_bytes <= budget
        now = seconds_of(graph, made, device)
        assert now <= before * (1 + 1e-9), budget
        before = now


def faster_links_are_never_slower(policy: Policy, graph: Graph, device: Device, budget: int) -> None:
    """Under one budget, with one link after the other ten times as fast."""
    before = float("inf")
    for out, back in ((1, 1), (10, 1), (10, 10)):
        faster = replace(
            device,
            offload_bytes_per_second=device.offload_bytes_per_second * out,
            prefetch_bytes_per_second=device.prefetch_bytes_per_second * back,
        )
        now = seconds_of(graph, policy.plan(graph, faster, budget), faster)
        assert now <= before * (1 + 1e-9)
        before = now


def moves(graph: Graph, made: Schedule) -> list[str]:
    """The transfers and recomputations of `made` in order, each with the op that runs next: `2 offload y0`."""
    found, ran = [], 0
    for instruction in made.instructions:
        if instruction.verb is Verb.RUN:
            ran = instruction.target + 1
        elif instruction.verb is Verb.RECOMPUTE:
            found.append(f"{ran} recompute {graph.ops[instruction.target].layer}")
        elif instruction.verb is not Verb.FREE:
            found.append(f"{ran} {instruction.verb} {graph.tensors[instruction.target].name}")
    return found


def with_moving_state(graph: Graph) -> Graph:
    """The same step where parameters may be anywhere between their uses."""
    tensors = (replace(t, movable=t.movable or t.kind is TensorKind.PARAMETER) for t in graph.tensors)
    return replace(graph, tensors=tuple(tensors))


def chain(types: Iterable[LayerType]) -> Graph:
    """Layer i reads the output of layer i-1 in forward, and again in its backward; the loss comes last."""
    return network([Layer(10_000, kind=kind) for kind in types])


def with_menu(graph: Graph, *workspaces: int) -> Graph:
    """Every convolution, forward and backward, has algorithms of these workspaces, the fastest first."""
    menu = tuple(Algorithm(f"algorithm {i}", nbytes, 1.0 + i) for i, nbytes in enumerate(workspaces))
    ops = (
        replace(op, algorithms=menu, workspace_bytes=workspaces[0]) if op.layer_type is LayerType.CONV else op
        for op in graph.ops
    )
    return replace(graph, ops=tuple(ops))
