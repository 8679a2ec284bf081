"""`superneurons`: segments and checkpoints, the LRU cache, prefetch one ahead, and recomputation by cost."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.policies.plans import (
    faster_links_are_never_slower,
    floor_bytes,
    larger_budgets_are_kept_and_never_slower,
    moves,
)
from tests.simulate.graphs import DEVICE, Build, Layer, devices, network, networks

from overspill.core import Device, Graph, LayerType, Phase, Verb
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import unmanaged_peak
from overspill.policies.base import Policy
from overspill_papers.planning.lru import evictions
from overspill_papers.policies.superneurons import (
    EXPENSIVE,
    Superneurons,
    SuperneuronsOffload,
    layer_peak_bytes,
    one_ahead,
    segments_of,
    speed_centric_bytes,
)

EXAMPLES = settings(max_examples=20, deadline=None)
both = pytest.mark.parametrize("policy", [Superneurons(), SuperneuronsOffload()], ids=lambda p: p.name)
CONV, NORM, ACT, POOL = LayerType.CONV, LayerType.NORM, LayerType.ACTIVATION, LayerType.POOL
# Ops 0 to 6 make y0 to y6, 7 and 8 are the loss, 9 to 15 the backward of l6 to l0, which reads the layer's input.
NET = network([*[Layer(10_000, kind) for kind in (CONV, NORM, ACT, CONV, NORM, ACT)], Layer(10_000, CONV)])
PEAK = 8192 + 4 + 80_000


def named(graph: Graph) -> list[tuple[int, list[str], list[str]]]:
    """The segments: the op that begins each, and the names of its checkpoints and of what is dropped."""
    names = [t.name for t in graph.tensors]
    return [
        (s.start.id, [names[t] for t in s.checkpoints], [names[t] for t in s.dropped])
        for s in segments_of(graph)
        if s.start.id < len(graph.layers) - 1
    ]


def test_the_saved_output_of_a_convolution_is_a_checkpoint_and_cheap_results_are_dropped() -> None:
    assert named(NET) == [(0, ["y0"], ["y1", "y2"]), (3, ["y3"], ["y4", "y5"]), (6, ["y6"], [])]


def test_where_the_convolutions_output_is_not_saved_the_activation_behind_it_is_the_checkpoint() -> None:
    graph = network(
        [
            Layer(10_000, CONV),
            Layer(10_000, ACT, saves_input=False, saves_output=True),
            Layer(10_000, POOL, saves_input=False, mask_bytes=8192),
            Layer(10_000, CONV),
        ]
    )
    assert named(graph)[0] == (0, ["y1"], ["y2", "m2"])


def test_where_segments_meet_a_new_one_begins() -> None:
    graph = network(
        [Layer(10_000, kind) for kind in (CONV, ACT, CONV)]
        + [Layer(10_000, LayerType.JOIN, skips=(1,)), Layer(10_000, ACT), Layer(10_000, CONV)]
    )
    assert named(graph) == [(0, ["y0"], ["y1"]), (2, ["y2"], []), (3, ["y3"], ["y4"]), (5, ["y5"], [])]


def test_random_layers_are_not_made_again() -> None:
    graph = network([Layer(10_000, CONV), Layer(10_000, LayerType.DROPOUT, random=True), Layer(10_000, ACT)])
    assert named(graph) == [(0, ["y0"], []), (1, ["y1"], ["y2"])]


def test_statistics_by_the_way_are_kept() -> None:
    graph = network([Layer(100_000, CONV), Layer(100_000, NORM, mask_bytes=1200), Layer(100_000, ACT)])
    assert named(graph)[0] == (0, ["y0"], ["y1", "y2"])


def test_nothing_leaves_while_recomputation_makes_everything_fit() -> None:
    made = Superneurons().plan(NET, DEVICE, PEAK - 20_000)
    assert moves(NET, made) == ["9 recompute l4", "9 recompute l5", "12 recompute l1", "12 recompute l2"]


def test_the_output_used_least_recently_leaves_when_memory_is_short_and_returns_one_checkpoint_ahead() -> None:
    # y3 is first wanted by backward at step 11, y0 at 14; only one of them has to go.
    made = SuperneuronsOffload().plan(NET, DEVICE, PEAK - 10_000)
    assert moves(NET, made) == ["2 offload y0", "8 await_offload y0", "11 prefetch y0", "14 await_prefetch y0"]


def test_both_leave_when_memory_is_shorter_in_the_order_of_use() -> None:
    made = SuperneuronsOffload().plan(NET, DEVICE, PEAK - 20_000)
    assert moves(NET, made) == [
        "2 offload y0", "5 offload y3", "6 await_offload y0", "8 await_offload y3",
        "10 prefetch y3", "11 prefetch y0", "11 await_prefetch y3", "14 await_prefetch y0",
    ]  # fmt: skip


def test_a_checkpoint_is_fetched_when_the_one_before_it_has_arrived() -> None:
    program = StepProgram(NET)
    gaps = [g for g in program.gaps if (g.start, g.end) in ((1, 14), (4, 11))]
    assert sorted(one_ahead(program, gaps).values()) == [8, 11]


def test_the_cache_evicts_by_last_use_and_keeps_what_it_can() -> None:
    build = Build()
    old, new, large = build.tensor(10_000), build.tensor(10_000), build.tensor(15_000)
    build.op([], [new])
    build.op([], [old])
    build.op([new], [])  # used once more: no longer the oldest
    build.op([], [large])
    build.op([old, new, large], [])
    program = StepProgram(build.graph())
    gaps = {gap: gap.end for gap in program.gaps if gap.end == 4 and gap.tensor != large}
    live = program.live_bytes()
    live[4] = 0  # what is wanted at once has to fit; not the cache's concern
    assert evictions(program, gaps, live, 35_000) == {}
    assert {gap.tensor: at for gap, at in (evictions(program, gaps, live, 30_000) or {}).items()} == {old: 3}


def test_a_segment_is_made_at_once_while_that_needs_no_more_than_the_largest_layer() -> None:
    graph = network([Layer(10_000, CONV), Layer(10_000, ACT), Layer(10_000, ACT), Layer(10_000, CONV)])
    first = segments_of(graph)[0]
    # A layer works with x, y, dy and dx; the segment with y1, y2 and the dy, dx of its last layer.
    assert layer_peak_bytes(graph) == 40_000
    assert speed_centric_bytes(graph, first) == 40_000
    made = Superneurons().plan(graph, DEVICE, unmanaged_peak(graph, DEVICE) - 1)
    assert [move for move in moves(graph, made) if "recompute" in move] == ["6 recompute l1", "6 recompute l2"]


def test_a_longer_segment_is_made_anew_for_each_layer() -> None:
    graph = network([Layer(10_000, CONV), *[Layer(10_000, ACT)] * 3, Layer(10_000, CONV)])
    assert speed_centric_bytes(graph, segments_of(graph)[0]) > layer_peak_bytes(graph)
    made = Superneurons().plan(graph, DEVICE, unmanaged_peak(graph, DEVICE) - 1)
    assert moves(graph, made) == [
        "7 recompute l1", "7 recompute l2", "7 recompute l3",  # for the backward of l4, which reads y3
        "8 recompute l1", "8 recompute l2",
        "9 recompute l1",
    ]  # fmt: skip


def test_memory_centric_recomputation_holds_no_more_than_one_layer_wants() -> None:
    graph = network([Layer(10_000, CONV), *[Layer(10_000, ACT)] * 6, Layer(10_000, CONV)])
    made = [t for s in segments_of(graph) for t in s.made]
    at_once, one_by_one = StepProgram(graph, made), StepProgram(graph, made, drop_after_use=made)
    # y0, what is made of it and wanted at once, dy and dx.
    assert one_by_one.live_bytes()[9:].max() == 8192 + 4 + 40_000
    assert at_once.live_bytes()[9:].max() == 8192 + 4 + 90_000


@given(networks())
@EXAMPLES
def test_only_cheap_layers_are_recomputed(graph: Graph) -> None:
    made = Superneurons().plan(graph, DEVICE, floor_bytes(Superneurons(), graph, DEVICE))
    assert all(graph.ops[op].layer_type not in EXPENSIVE for op in made.targets(Verb.RECOMPUTE))


@given(networks())
@EXAMPLES
def test_without_recomputation_only_what_comes_of_convolutions_moves(graph: Graph) -> None:
    made = SuperneuronsOffload().plan(graph, DEVICE, floor_bytes(SuperneuronsOffload(), graph, DEVICE))
    convolutions = {t for s in segments_of(graph) if s.start.layer_type is CONV for t in s.checkpoints}
    assert set(made.targets(Verb.OFFLOAD)) <= convolutions
    assert Verb.RECOMPUTE not in made.counts


@both
@given(graph=networks(), device=devices())
@EXAMPLES
def test_larger_budgets_are_kept_and_never_slower(policy: Policy, graph: Graph, device: Device) -> None:
    larger_budgets_are_kept_and_never_slower(policy, graph, device)


@both
@given(graph=networks(), device=devices(), share=st.sampled_from([0.0, 0.3, 0.7]))
@EXAMPLES
def test_faster_links_are_never_slower(policy: Policy, graph: Graph, device: Device, share: float) -> None:
    floor = floor_bytes(policy, graph, device)
    budget = floor + int(share * max(0, unmanaged_peak(graph, device) - floor))
    faster_links_are_never_slower(policy, graph, device, budget)


@both
@given(graph=networks())
@EXAMPLES
def test_with_room_for_everything_nothing_is_done(policy: Policy, graph: Graph) -> None:
    for budget in (unmanaged_peak(graph, DEVICE), None):
        assert set(policy.plan(graph, DEVICE, budget).counts) <= {Verb.RUN, Verb.FREE}


def test_every_segment_begins_in_forward() -> None:
    assert all(segment.start.phase is Phase.FORWARD for segment in segments_of(NET))
