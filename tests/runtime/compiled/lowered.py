"""One captured step, run by many plans: a plan's lowered graphs are called directly, with nothing of torch.compile around.

What AOTAutograd's wrappers do for the graphs is done here by hand: primals are handed in, updated inputs are written
back, and what forward saved goes to backward with the tangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.fx.graph import _BoxedCodeGen

from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings, capture
from overspill.capture.compiled.joint import JointGraph
from overspill.core import Device, Graph, Phase, Schedule, Verb
from overspill.core.errors import InfeasibleBudget
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.planned import Frame
from overspill.runtime.compiled.session import Session
from overspill.runtime.lower import lower
from overspill.runtime.options import Options
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.training import same_bits
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.ops import register_engine
from overspill.runtime.transfer.stores import Store

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
        self, joint: JointGraph, inputs: list[InputInfo], examples: Sequence[Any], frame: Frame, *_how: Any
    ) -> Any:
        raise _Caught(capture(joint, inputs, Surroundings()), list(examples))


@dataclass(frozen=True)
class Step:
    """A module's step as captured, the values of its inputs, and the numbers that plain PyTorch gives."""

    captured: Captured
    inputs: list[Any]
    plain: Numbers

    @property
    def graph(self) -> Graph:
        return self.captured.graph


def captured_step(module: nn.Module, batch: tuple[Tensor, ...]) -> Step:
    """`module`, which returns a loss, captured by one torch.compile; and one step of it in eager mode."""
    compiled = compile_in(_CaptureOnly(Options()), module, fullgraph=True)
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
    torch.manual_seed(SEED)
    loss = module(*batch)
    loss.backward()
    gradients = {i: v.grad for i, v in enumerate(inputs) if isinstance(v, Tensor) and v.grad is not None}
    updated = {i: inputs[i].clone() for i, old in before.items() if not same_bits(old, inputs[i])}
    for position, old in before.items():
        inputs[position].copy_(old)
    return Step(captured, inputs, Numbers(loss.detach(), gradients, updated))


def run(step: Step, schedule: Schedule, store: Store) -> Ran:
    """One step of `schedule`, with an engine of its own over `store`."""
    joint = step.captured.joint
    engine = make_engine(store, CPU)
    try:
        forward, backward = (_boxed(m) for m in lower(step.captured, schedule, register_engine(engine)))
        tracker = LiveBytes(CPU)
        inputs = [v.detach().clone() if isinstance(v, Tensor) and not v.requires_grad else v for v in step.inputs]
        primals = [inputs[_position(node, i)] for i, node in enumerate(joint.primals)]
        torch.manual_seed(SEED)
        tracker.add(primals)
        with torch.no_grad(), tracker:
            results = forward([*primals])
            outputs, saved = results[: len(joint.forward_outputs)], list(results[len(joint.forward_outputs) :])
            del results
            loss = _write_back(joint, primals, outputs)
            del outputs
            saved += [torch.ones_like(loss) for _ in joint.tangents]
            gradients = backward(saved)
            tracker.add(gradients)
        slots = engine.stored_count
        numbers = Numbers(loss, _gradients(joint, gradients), _updated(step, inputs))
        return Ran(numbers, engine.offloaded_bytes, engine.prefetched_bytes, tracker.peak_bytes, slots)
    finally:
        engine.close()


def _boxed(module: fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`module` as what takes its arguments in a list and empties it, as the runtime calls it."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return module.forward


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
    except InfeasibleBudget as error:
        floor = error.floor_bytes
    return chosen.plan(graph, device, floor + int(share * max(0, unmanaged_peak(graph, device) - floor)))


def moved_bytes(graph: Graph, schedule: Schedule, verb: Verb) -> int:
    """Bytes that `schedule` moves by `verb` in its forward and backward."""
    total = 0
    for instruction in schedule.instructions:
        if instruction.verb is Verb.RUN and graph.ops[instruction.target].phase is Phase.UPDATE:
            break
        if instruction.verb is verb:
            total += graph.tensors[instruction.target].nbytes
    return total
