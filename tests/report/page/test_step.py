"""The columns of the linked views agree with the timeline, the trace and the reference machine they are taken from."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from tests.simulate.graphs import DEVICE, networks

from overspill.core import Block, Graph, Layout, Trace, Verb
from overspill.core.errors import RequestError
from overspill.core.units import format_bytes
from overspill.plans.plan import Plan
from overspill.policies.in_core import Liveness
from overspill.report.page import StepRun
from overspill.report.page.step import addresses, run, step
from overspill.simulate import check, owned_trace, simulate
from overspill_papers.policies.lms import LargeModelSupport


def held(found: StepRun, position: int) -> list[int]:
    """The spans on the device at `position`."""
    return np.flatnonzero((found.start <= position) & (position < found.end)).tolist()


def bytes_at(found: StepRun, position: int) -> int:
    return int(found.nbytes[held(found, position)].sum())


@settings(max_examples=25, deadline=None)
@given(networks())
def test_spans_add_up_to_the_live_bytes_of_the_timeline_at_every_instruction(graph: Graph) -> None:
    for policy in (Liveness, LargeModelSupport):
        schedule = policy().plan(graph, DEVICE)
        timeline = simulate(graph, schedule, DEVICE, [1e-3] * len(graph.ops))
        found = run(graph, schedule, timeline, "it")
        for position, instruction in enumerate(schedule.instructions):
            # A span ends where its Free stands; the timeline counts what was there as that began.
            freed = graph.tensors[instruction.target].nbytes if instruction.verb is Verb.FREE else 0
            assert bytes_at(found, position) + freed == timeline.live_bytes[position]


@settings(max_examples=25, deadline=None)
@given(networks())
def test_the_tensors_at_the_peak_are_those_that_the_reference_machine_finds(graph: Graph) -> None:
    schedule = LargeModelSupport().plan(graph, DEVICE)
    timeline = simulate(graph, schedule, DEVICE, [1e-3] * len(graph.ops))
    found, result = run(graph, schedule, timeline, "it"), check(graph, schedule)
    if result.peak_instruction >= 0:
        there = held(found, result.peak_instruction)
        tensors = {int(found.tensor[i]) for i in there if found.tensor[i] >= 0}
        assert tensors == set(result.live_at_peak)
        assert bytes_at(found, result.peak_instruction) == result.peak_bytes


def test_addresses_above_a_budget_of_live_bytes_are_explained(plan: Plan) -> None:
    reach = step(plan).runs[0].reserved_bytes or 0
    within = step(replace(plan, budget_bytes=reach))
    assert within.note == ""
    over = step(replace(plan, budget_bytes=reach // 2))
    assert format_bytes(reach) in over.note
    assert f"The budget, {format_bytes(reach // 2)}, is of live bytes" in over.note
    of_a_card = replace(plan, device_bytes=reach, device_budget_bytes=reach // 2)
    assert step(of_a_card).note == ""


def test_each_block_belongs_to_the_tensor_or_the_op_whose_name_it_has(plan: Plan) -> None:
    trace, owners = owned_trace(plan.graph, plan.schedule)
    for block, owner in zip(trace.blocks, owners, strict=True):
        tensors, ops = plan.graph.tensors, plan.graph.ops
        assert block.name == (tensors[owner].name if owner >= 0 else f"workspace of {ops[-1 - owner].name}")
        assert owner < 0 or block.nbytes == tensors[owner].nbytes
    assert any(owner < 0 for owner in owners)


def test_a_plan_and_its_unmanaged_step_have_all_events_and_addresses(plan: Plan) -> None:
    made = step(plan, "portfolio")
    planned, unmanaged = made.runs
    assert planned.seconds[-1] == plan.step_seconds
    assert unmanaged.seconds[-1] == plan.in_core_seconds
    verbs = Counter(planned.verbs[verb] for verb in planned.verb)
    moving = (Verb.RUN, Verb.RECOMPUTE, Verb.OFFLOAD, Verb.PREFETCH)
    assert verbs == {verb.value: n for verb, n in plan.schedule.counts.items() if verb in moving}
    assert verbs["offload"] > 0
    trace, _ = owned_trace(plan.graph, plan.schedule)
    layout = Layout("portfolio", tuple(planned.offset.tolist()), planned.reserved_bytes or 0, trace.lower_bound_bytes)
    layout.validate(trace)
    assert [(mark.name, mark.at) for mark in made.marks] == [("budget", plan.budget_bytes)]


def test_layers_and_makers_are_those_of_the_graph(plan: Plan) -> None:
    made, graph = step(plan), plan.graph
    for tensor in graph.tensors:
        layer = made.layers[made.tensors.layer[tensor.id]]
        assert layer == graph.ops[graph.uses[tensor.id][0]].layer
        assert made.tensors.maker[tensor.id] == graph.producer.get(tensor.id, -1)
    for op in graph.ops:
        assert tuple(made.ops.read[made.ops.first_read[op.id] : made.ops.first_read[op.id + 1]]) == op.reads
        assert tuple(made.ops.written[made.ops.first_written[op.id] : made.ops.first_written[op.id + 1]]) == op.writes


def test_a_layout_alone_has_spans_for_what_lies_between_gaps_and_spaces_above_one_another() -> None:
    trace = Trace((Block(7, 5, 9, 4096, "a", gaps=((6, 7),)), Block(8, 5, 8, 512, space=1)))
    made = addresses(trace, Layout("by hand", (1024, 0), 5632, 4608), "a layout", 8192)
    (found,) = made.runs
    assert list(zip(found.start, found.end, found.offset, strict=True)) == [(0, 1, 1024), (2, 4, 1024), (0, 3, 5120)]
    assert list(made.tensors.name) == ["a", "block 8"]
    assert list(made.tensors.kind) == ["4.0 KiB and more", "less than 4.0 KiB"]


def test_a_name_that_places_nothing_is_refused(plan: Plan) -> None:
    with pytest.raises(RequestError, match="places blocks"):
        step(plan, "nobody")
