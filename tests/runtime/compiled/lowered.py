"""One captured step, run by many plans: a plan's lowered graphs are called directly, with nothing of torch.compile around.

What AOTAutograd's wrappers do for the graphs is done here by hand: primals are handed in, updated inputs are written
back, and what forward saved goes to backward with the tangents.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from tests.runtime.schedules import draw
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

from overspill.capture.compiled.graph import HANDLE_BYTES, Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.capture.programs.joint import JointOfPrograms
from overspill.core import Device, Graph, Phase, Places, Schedule, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.models import load
from overspill.models.step import TrainingStep
from overspill.placement.arena import places_of
from overspill.placement.packing import solver_named
from overspill.placement.place import SEARCH
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES
from overspill.runtime.arena import Arena, Arenas
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.partitions import Partitioned
from overspill.runtime.compiled.pending_calls import GraphFrame
from overspill.runtime.compiled.session import Session
from overspill.runtime.driver import LoweredProgram
from overspill.runtime.lower import NO_ARENA, lower
from overspill.runtime.options import Options
from overspill.runtime.reachable import same_bits
from overspill.runtime.recording.instrument import run as run_program
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.ops import register_engine
from overspill.runtime.transfer.stores import Store
from overspill.simulate import check

CPU = torch.device("cpu")
SEED = 1


@dataclass(frozen=True)
class Numbers:
    """What a step gives: the loss, and by position among the step's inputs each gradient and each updated buffer."""

    loss: Tensor
    gradients: dict[int, Tensor]
    updated: dict[int, Tensor]

    def differences(self, other: Numbers) -> list[str]:
        """Names of what is not the same to the last bit."""
        found = [] if same_bits(self.loss, other.loss) else ["loss"]
        for name in ("gradients", "updated"):
            mine, others = getattr(self, name), getattr(other, name)
            found += [f"{name} of {sorted(mine)}, not of {sorted(others)}"] if mine.keys() != others.keys() else []
            found += [f"{name}[{i}]" for i in mine.keys() & others.keys() if not same_bits(mine[i], others[i])]
        return found


@dataclass(frozen=True)
class Ran:
    """One run of a plan: its numbers, the bytes that it moved each way, and the most that was live."""

    numbers: Numbers
    offloaded_bytes: int
    prefetched_bytes: int
    peak_bytes: int
    slots_left: int


class _Caught(Exception):
    def __init__(self, captured: Captured, examples: list[Any]) -> None:
        super().__init__("captured")
        self.found = captured, examples


class _CaptureOnly(Session):
    """Stops torch.compile once the step is captured."""

    def plan(
        self,
        joint: JointGraph,
        inputs: list[InputInfo],
        examples: Sequence[Any],
        frame: GraphFrame,
        how: Any,
        *_make: Any,
    ) -> Any:
        found = how(joint, inputs, Surroundings())
        raise _Caught(found.of(found.graph) if isinstance(found, Partitioned) else found, list(examples))


@dataclass(frozen=True)
class Step:
    """A module's step as captured, the values of its inputs, and the numbers that plain PyTorch gives."""

    captured: Captured
    inputs: list[Any]
    plain: Numbers

    @property
    def graph(self) -> Graph:
        return self.captured.graph


def captured_step(module: nn.Module, batch: tuple[Tensor, ...], backend: str = "eager") -> Step:
    """`module`, which returns a loss, captured by one torch.compile; and one step of it by eager or stock torch.compile."""
    options = Options(backend=backend, partition=1.0 if backend == "inductor" else None)
    compiled = compile_in(_CaptureOnly(options), module, fullgraph=True)
    try:
        compiled(*batch)
    except (_Caught, BackendCompilerFailed) as failure:
        caught = failure if isinstance(failure, _Caught) else failure.inner_exception
        if not isinstance(caught, _Caught):
            raise
        captured, inputs = caught.found
    finally:
        torch._dynamo.reset()
    before = {i: v.detach().clone() for i, v in enumerate(inputs) if isinstance(v, Tensor) and not v.requires_grad}
    stock = torch.compile(module, fullgraph=True, dynamic=False) if backend == "inductor" else module
    if stock is not module:  # compiling draws random numbers
        stock(*batch).backward()
        module.zero_grad()
        for position, old in before.items():
            inputs[position].copy_(old)
    torch.manual_seed(SEED)
    loss = stock(*batch)
    loss.backward()
    gradients = {i: v.grad for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.grad is not None}
    updated = {i: inputs[i].clone() for i, old in before.items() if not same_bits(old, inputs[i])}
    for position, old in before.items():
        inputs[position].copy_(old)
    return Step(captured, inputs, Numbers(loss.detach(), gradients, updated))


def built_in(model: str) -> tuple[TrainingStep, tuple[Tensor, ...]]:
    """A small built-in model with its loss, and a batch of two."""
    if model == "bert-base":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    job = load(model, small=True)
    return TrainingStep(job), job.make_batch(2)


def run(step: Step, schedule: Schedule, store: Store, places: Places | None = None) -> Ran:
    """One step of `schedule`, with an engine of its own over `store`, and at `places` of an arena."""
    joint = step.captured.joint
    engine = make_engine(store, CPU)
    arenas = Arenas()
    arena = NO_ARENA if places is None else Arena(places, arenas.taker(places.arena_bytes, CPU))
    try:
        lowered = lower(step.captured, schedule, register_engine(engine), arena=arena)
        forward, backward = (LoweredProgram(stretch.module) for stretch in lowered)
        tracker = LiveBytes(CPU)
        inputs = [v.detach().clone() if isinstance(v, Tensor) and not v.requires_grad else v for v in step.inputs]
        primals = [inputs[_position(node, i)] for i, node in enumerate(joint.primals)]
        torch.manual_seed(SEED)
        tracker.add(primals)
        begun = tracker.live_bytes
        # No dispatch mode sees what compiled kernels are given, nor what is taken for an arena.
        by_calls = isinstance(joint, JointOfPrograms) or places is not None
        with torch.no_grad(), tracker, allocations() if by_calls else nullcontext() as allocated:
            results = run_program(forward, step.graph, None, [*primals])
            outputs, saved = results[: len(joint.forward_outputs)], list(results[len(joint.forward_outputs) :])
            del results
            loss = _write_back(joint, primals, outputs)
            del outputs
            saved += [torch.ones_like(loss) for _ in joint.tangents]
            gradients = run_program(backward, step.graph, None, saved)
            tracker.add(gradients)
        slots = engine.stored_count
        numbers = Numbers(loss, _gradients(joint, gradients), _updated(step, inputs))
        peak = tracker.peak_bytes if allocated is None else begun + peak_of(allocated.changes)[0]
        return Ran(numbers, engine.offloaded_bytes, engine.prefetched_bytes, peak, slots)
    finally:
        engine.close()


def _position(node: fx.Node, otherwise: int) -> int:
    index = getattr(node.meta.get("desc"), "idx", None)
    return otherwise if index is None else index


def _write_back(joint: JointGraph, primals: list[Any], outputs: Sequence[Any]) -> Tensor:
    """Update the inputs that the step updates; the loss, the one output that is not such an update."""
    by_node = dict(zip(joint.primals, primals, strict=True))
    new = {value: primal for primal, value in joint.write_backs.items()}
    results = []
    for node, desc, value in zip(joint.forward_outputs, joint.forward_descs, outputs, strict=True):
        if type(desc).__name__ == "InputMutationAOTOutput":
            by_node[new[node]].copy_(value)
        else:
            results.append(value)
    (loss,) = results
    return loss


def _gradients(joint: JointGraph, values: Sequence[Any]) -> dict[int, Tensor]:
    primals = {repr(p.meta.get("desc")): _position(p, i) for i, p in enumerate(joint.primals)}
    return {
        primals[repr(desc.grad_of)]: value
        for desc, value in zip(joint.backward_descs, values, strict=True)
        if isinstance(value, Tensor)
    }


def _updated(step: Step, inputs: list[Any]) -> dict[int, Tensor]:
    return {
        i: v
        for i, (v, old) in enumerate(zip(inputs, step.inputs, strict=True))
        if isinstance(v, Tensor) and v is not old and not same_bits(v, old)
    }


def plan(graph: Graph, device: Device, policy: str, share: float | None = 0.5) -> Schedule:
    """The policy's schedule for a budget at `share` between its floor and what plain training needs; None: unlimited."""
    chosen = POLICIES[policy]()
    if not chosen.plans_for_budget or share is None:
        return chosen.plan(graph, device)
    floor = 1
    try:
        return chosen.plan(graph, device, 1)
    except InfeasibleBudgetError as error:
        floor = error.floor_bytes
    return chosen.plan(graph, device, floor + int(share * max(0, unmanaged_peak(graph, device) - floor)))


def moved_bytes(graph: Graph, schedule: Schedule, verb: Verb) -> int:
    """Bytes that `schedule` moves by `verb` in its forward and backward, or in its whole step."""
    total = 0
    for instruction in schedule.instructions:
        is_update = instruction.verb is Verb.RUN and graph.ops[instruction.target].phase is Phase.UPDATE
        if is_update and not graph.whole_step:
            break
        if instruction.verb is verb:
            total += graph.tensors[instruction.target].nbytes
    return total


def check_schedule(step: Step, random: Random, store: Store, *, in_arena: bool = False) -> float:
    """One step by another schedule has the numbers of plain PyTorch, moves what it says, and takes no more; the share that it takes."""
    schedule = draw(step.graph, random)
    places = places_of(step.graph, schedule, (), solver_named(), SEARCH) if in_arena else None
    peak = check(step.graph, schedule).peak_bytes if places is None else places.total_bytes
    ran = run(step, schedule, store, places)
    assert step.plain.differences(ran.numbers) == []
    assert ran.offloaded_bytes == moved_bytes(step.graph, schedule, Verb.OFFLOAD)
    assert ran.prefetched_bytes == moved_bytes(step.graph, schedule, Verb.PREFETCH)
    assert ran.slots_left == 0
    assert ran.peak_bytes <= peak
    # A step of many small tensors has room for more handles than it uses.
    handles = HANDLE_BYTES * sum(t.movable for t in step.graph.tensors)
    return (ran.peak_bytes + handles) / peak
