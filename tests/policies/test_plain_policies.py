"""`in-core`, `liveness`, `oracle` and `checkpoint`: what they keep, and for how long."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import ceil, sqrt

import pytest
from hypothesis import given, settings
from tests.simulate.graphs import DEVICE, Layer, layers, network, networks

from overspill.core import Graph, Phase, TensorKind, Verb
from overspill.planning.floor import retained_bytes
from overspill.plans.plan import make_plan, unmanaged_peak
from overspill.policies.checkpoint import Checkpoint
from overspill.policies.in_core import InCore, Liveness, Oracle
from overspill.simulate import check

EXAMPLES = settings(max_examples=20, deadline=None)


@given(networks())
@EXAMPLES
def test_in_core_frees_no_feature_map_before_the_end_of_backward(graph: Graph) -> None:
    made = InCore().plan(graph, DEVICE)
    last = max(op.id for op in graph.ops if op.phase is Phase.BACKWARD)
    for instruction in made.instructions:
        if instruction.verb is Verb.RUN and instruction.target == last:
            return
        if instruction.verb is Verb.FREE:
            assert graph.tensors[instruction.target].kind is not TensorKind.ACTIVATION


@given(networks())
@EXAMPLES
def test_liveness_frees_each_tensor_right_after_its_last_use(graph: Graph) -> None:
    now = -1
    for instruction in Liveness().plan(graph, DEVICE).instructions:
        if instruction.verb is Verb.RUN:
            now = instruction.target
        else:
            assert graph.uses[instruction.target][-1] == now


@given(networks())
@EXAMPLES
def test_in_core_never_peaks_below_liveness(graph: Graph) -> None:
    assert (
        check(graph, InCore().plan(graph, DEVICE)).peak_bytes >= check(graph, Liveness().plan(graph, DEVICE)).peak_bytes
    )


@given(networks())
@EXAMPLES
def test_checkpoint_keeps_what_random_ops_made_until_its_last_use(graph: Graph) -> None:
    frees = Counter(Checkpoint().plan(graph, DEVICE).targets(Verb.FREE))
    for op in graph.ops:
        if not op.recomputable and op.phase is Phase.FORWARD:
            assert all(frees[t] == 1 for t in op.writes if not graph.tensors[t].persistent)


@given(networks())
@EXAMPLES
def test_checkpoint_recomputes_each_op_at_most_once(graph: Graph) -> None:
    rematerialized = Checkpoint().plan(graph, DEVICE).targets(Verb.RECOMPUTE)
    assert len(rematerialized) == len(set(rematerialized))


@given(layers())
@EXAMPLES
def test_checkpoint_never_retains_more_than_liveness_where_backward_reads_all_inputs(drawn: list[Layer]) -> None:
    # Elsewhere it may: what a recomputation reads is then kept for nothing else.
    graph = network([replace(layer, saves_input=True) for layer in drawn])
    kept, plain = (retained_bytes(graph, policy().plan(graph, DEVICE)) for policy in (Checkpoint, Liveness))
    assert kept <= plain


@pytest.mark.parametrize("depth", [9, 16, 36, 100])
def test_checkpoint_retains_about_the_root_of_a_deep_chain(depth: int) -> None:
    graph = network([Layer(1000) for _ in range(depth)])
    kept, plain = (retained_bytes(graph, policy().plan(graph, DEVICE)) for policy in (Checkpoint, Liveness))
    assert plain == 1000 * depth + 4
    # One boundary a segment, and the last segment whole.
    assert kept <= 1000 * 2 * (ceil(sqrt(depth + 1)) + 1)


def test_checkpoint_cuts_where_few_bytes_cross() -> None:
    sizes = [8000, 8000, 100, 8000, 8000, 8000, 100, 8000, 8000]
    graph = network([Layer(n) for n in sizes])
    made = Checkpoint().plan(graph, DEVICE)
    rematerialized = {t for op in made.targets(Verb.RECOMPUTE) for t in graph.ops[op].writes}
    small = {t.id for t in graph.tensors if t.name in ("y2", "y6")}
    assert rematerialized
    assert not rematerialized & small


def test_checkpoint_of_a_step_too_short_to_cut_is_liveness() -> None:
    graph = network([Layer(1000)])
    assert Checkpoint().plan(graph, DEVICE).instructions == Liveness().plan(graph, DEVICE).instructions


@given(networks())
@EXAMPLES
def test_the_oracle_does_what_liveness_does_whatever_the_budget(graph: Graph) -> None:
    plan = make_plan(graph, DEVICE, "oracle", 1)
    assert plan.schedule.instructions == Liveness().plan(graph, DEVICE).instructions
    assert plan.peak_bytes == unmanaged_peak(graph, DEVICE)
    assert plan.slowdown == pytest.approx(1)


def test_no_other_policy_is_unlimited() -> None:
    assert Oracle.unlimited
    assert not Liveness.unlimited
