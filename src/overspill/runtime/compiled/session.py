"""A session: one compiled model, its budget, its store, and the plans of all graphs that Dynamo finds in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings, capture
from overspill.capture.compiled.joint import JointGraph
from overspill.core import Device, Graph, TensorKind
from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes
from overspill.costs import MeasuredTimes
from overspill.placement.packing import solver_named
from overspill.planning.gaps import swappable_gaps
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import Plan, retained_bytes
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.planned_steps import PlannedSteps
from overspill.runtime.options import (
    Options,
    budget_for,
    device_for,
    infeasible_for,
    open_engine,
    plan_graph,
    store_bytes,
)
from overspill.runtime.profile import OpTimer
from overspill.runtime.surroundings import surroundings_of
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_memory import economise


@dataclass(frozen=True)
class Frame:
    """Which graph of the model is planned: Dynamo's frame, and whether a graph break follows it."""

    id: int
    broken: bool


@dataclass
class _Planned:
    """One plan, of one graph of a frame: each input shape, and evaluation, has its own."""

    frame: int
    plan: Plan
    retained_bytes: int
    parameters: tuple[int, ...] = field(default=())


class Session:
    """Plans every graph of one compiled model within one budget, and owns the engine that moves its tensors."""

    def __init__(
        self, options: Options, parameters: Iterable[Tensor] = (), optimizers: Sequence[Optimizer] | None = None
    ) -> None:
        self.options = options
        self.accumulates = False
        self.tracker: LiveBytes | None = None
        self.timer: OpTimer | None = None
        self.steps: PlannedSteps | None = None
        self.follow(parameters)
        self._optimizers = optimizers
        self._planned: list[_Planned] = []
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self.device_name = ""

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Tell the session which are the model's parameters from now on."""
        self._parameters = [weakref.ref(p) for p in parameters]

    def watch(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Tell the session of the module's parameters and the optimizer, before the first call."""
        self.follow(module.parameters())
        self._optimizers = [optimizer]

    def place_live(self, device: str = "cuda", **settings: Any) -> None:
        """From now on, give the blocks of each step the addresses that a solver finds for those of a recorded one.

        On CUDA that is for all that PyTorch allocates; raises RequestError where it has begun to use the GPU already.
        """
        allocator = LiveAllocator(device, **settings)
        if device == "cuda":
            allocator.serve_pytorch()
        self.steps = PlannedSteps(allocator, solver_named())

    # -- what a user may ask

    @property
    def plans(self) -> list[Plan]:
        """The plans in force, one for each graph of the model, in the order in which they were made."""
        return [planned.plan for planned in self._planned]

    @property
    def engine(self) -> TransferEngine | None:
        """The transfer engine, once a plan has needed one."""
        return self._engine

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Op times of the run so far, if the session profiles."""
        return self.timer.times(self.device_name) if self.timer is not None else None

    @property
    def peak_bytes(self) -> int:
        """The planned peak of the whole step."""
        return max((plan.peak_bytes for plan in self.plans), default=0)

    def close(self) -> None:
        """End the transfer threads and give the store back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def gradients_are_kept(self) -> bool:
        """Whether any parameter of the model has a gradient now."""
        return any(p.grad is not None for ref in self._parameters if (p := ref()) is not None)

    def forget_plans(self) -> None:
        """Drop the plans, before the model is compiled anew."""
        self._planned.clear()

    # -- planning

    def plan(
        self, joint: JointGraph, inputs: list[InputInfo], examples: Sequence[Any], frame: Frame
    ) -> tuple[Captured, Plan]:
        """The captured graph of `frame` and its plan. Raises InfeasibleBudget when the budget cannot be met."""
        where = torch_device(examples)
        device = device_for(self.options, where)
        self.device_name = device.name
        here = [e for e in examples if isinstance(e, nn.Parameter)]
        others = sum(self._retained_elsewhere(frame).values())
        surroundings = self._surroundings(joint, here, others)
        captured = capture(joint, inputs, surroundings)
        budget = self._budget(captured.graph, device, examples)
        if frame.broken:
            # What follows is unknown yet: leave it all the memory that can be freed between forward and backward.
            rest = max(surroundings.reserved_bytes, budget - _least_between(captured.graph))
            captured = capture(joint, inputs, replace(surroundings, reserved_bytes=rest))
        given = (e for e, info in zip(examples, inputs, strict=True) if info.kind is TensorKind.INPUT)
        with infeasible_for("training" if joint.tangents else "evaluation", given):
            plan = plan_graph(self.options, captured.graph, device, budget)
        retained = retained_bytes(captured.graph, plan.schedule)
        self._planned.append(_Planned(frame.id, plan, retained, tuple(id(p) for p in here)))
        self._check_whole(budget, here, frame)
        return captured, plan

    def _retained_elsewhere(self, frame: Frame) -> dict[int, int]:
        """For each other frame, the most that any plan of it leaves between its forward and its backward."""
        found: dict[int, int] = {}
        for planned in self._planned:
            if planned.frame != frame.id:
                found[planned.frame] = max(found.get(planned.frame, 0), planned.retained_bytes)
        return found

    def engine_for(self, plan: Plan, device: torch.device) -> int:
        """The number of the engine, with room in its store for what `plan` offloads."""
        if device.type == "cpu":
            economise(plan.unmanaged_peak_bytes)
        if self._engine is None:
            self._engine, self._engine_number = open_engine(self.options, device)
            weakref.finalize(self, self._engine.close)
        with _disable_current_modes():  # AOTAutograd calls us in its fake mode; the store is real
            self._engine.store.reserve(store_bytes(plan))
        return self._engine_number

    def _surroundings(self, joint: JointGraph, here: list[nn.Parameter], retained_bytes: int) -> Surroundings:
        parameters = [p for ref in self._parameters if (p := ref()) is not None]
        return surroundings_of(
            joint, here, parameters, self._optimizers, self.options.reserve,
            retained_bytes=retained_bytes, accumulates=self.accumulates,
        )  # fmt: skip

    def _budget(self, graph: Graph, device: Device, examples: Sequence[Any]) -> int:
        return budget_for(self.options, graph, device, torch_device(examples))

    def _check_whole(self, budget: int, here: list[nn.Parameter], frame: Frame) -> None:
        """Refuse a further graph whose parameters' gradients no longer fit beside the backward of an earlier one."""
        for planned in self._planned:
            known = set(planned.parameters) | {id(p) for ref in self._parameters if (p := ref()) is not None}
            new = sum(2 * p.nbytes for p in here if id(p) not in known)
            if planned.frame != frame.id and planned.plan.peak_bytes + new > budget:
                raise InfeasibleBudget(
                    f"infeasible: the model has several graphs, and {format_bytes(new)} of parameters and gradients of a later "
                    f"one do not fit beside the first one's peak of {format_bytes(planned.plan.peak_bytes)} in "
                    f"{format_bytes(budget)}; use overspill.compile(model, ...), which sees all parameters at once",
                    budget_bytes=budget,
                    floor_bytes=planned.plan.peak_bytes + new,
                    cause="parameters and gradients of a later graph",
                )


def torch_device(examples: Sequence[Any]) -> torch.device:
    """The device of the first tensor among `examples`."""
    return next((e.device for e in examples if isinstance(e, Tensor)), torch.device("cpu"))


def _least_between(graph: Graph) -> int:
    """The least bytes that can be on the device between forward and backward."""
    program = StepProgram(graph)
    boundary = program.end_of_forward
    absent = {g.tensor for g in swappable_gaps(program) if g.start < boundary <= g.end}
    staying = [
        t for t in graph.tensors
        if t.persistent or (t.id not in absent and (u := program.touches[t.id]) and u[0] < boundary <= u[-1])
    ]  # fmt: skip
    return sum(t.nbytes for t in staying)
