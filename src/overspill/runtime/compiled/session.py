"""A session: the compiled models that share a budget, its store, and the plans of all graphs that Dynamo finds in them."""

from __future__ import annotations

import warnings
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
from overspill.core import Device, Graph, Phase, TensorKind
from overspill.core.errors import InfeasibleBudget
from overspill.core.units import format_bytes, parse_bytes
from overspill.costs import MeasuredTimes
from overspill.placement.packing import solver_named
from overspill.planning.gaps import swappable_gaps
from overspill.planning.step_program import StepProgram
from overspill.plans.plan import Plan, retained_bytes, unmanaged_peak
from overspill.runtime.hardware import usable_bytes
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

from .in_force import Watch

Part = tuple[int, ...]
"""What tells a part of the job apart from others, over compilations too: its model, and the parameters that it reads."""
MOST_ROUNDS = 4
"""How often plans are made anew because several parts keep more at once than was known."""
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


@dataclass(frozen=True)
class Frame:
    """Which graph of the model is planned: Dynamo's frame, and whether a graph break follows it."""

    id: int
    broken: bool


@dataclass
class _Planned:
    """One plan, of one graph of a part of the models: each input shape, and evaluation, has its own.

    Between its forward and its backward it leaves `retained_bytes` on the device, and the plan assumes that the job's
    other models leave `others_bytes` there.
    """

    frame: Frame
    part: Part
    plan: Plan
    retained_bytes: int
    others_bytes: int
    parameters: tuple[int, ...] = field(default=())


class Session:
    """Plans every graph of the models compiled in it within one budget, and owns the engine that moves their tensors.

    Several models of one job (a GAN, teacher and student) share a budget when they are given one session:

        session = overspill.Session(budget="8GiB")
        generator, critic = (overspill.compile(m, session=session) for m in (generator, critic))

    The arguments by keyword are those of `overspill.compile`.
    """

    def __init__(
        self,
        options: Options | None = None,
        parameters: Iterable[Tensor] = (),
        optimizers: Sequence[Optimizer] | None = None,
        **asked: Any,
    ) -> None:
        """Raises RequestError for options that cannot be right."""
        self.options = Options(**asked) if options is None else options
        options = self.options
        self.accumulates = False
        self.tracker: LiveBytes | None = None
        self.timer: OpTimer | None = None
        self.steps: PlannedSteps | None = None
        self._parameters: list[weakref.ref[Tensor]] = []
        self.follow(parameters)
        self._optimizers = optimizers
        self._planned: list[_Planned] = []
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self.device_name = ""
        self.watch_calls = Watch(options.on_unplanned)
        self.outdated = False
        """Whether plans have to be made anew, for something has come to the device that they do not know of."""
        self._fixed_budget: int | None = None
        self._counted: set[Part] = set()  # the training graphs that the fixed budget is for: a part, and how many ops
        self._retained: dict[Part, int] = {}
        self._rounds = 0
        self._calling = 0  # which model is called, where there are several
        _SESSIONS.add(self)

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Tell the session of parameters that it may not know; those that are gone it forgets."""
        here = [ref for ref in self._parameters if ref() is not None]
        known = {id(ref()) for ref in here}
        self._parameters = here + [weakref.ref(p) for p in parameters if id(p) not in known]

    def watch(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Tell the session of the module's parameters and the optimizer, before the first call."""
        self.follow(module.parameters())
        self._optimizers = [optimizer]

    def add(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] | None) -> None:
        """Another model of the job; without `optimizers` those that step on its parameters are found."""
        alone = not self._parameters
        self.follow(parameters)
        if optimizers is None or (self._optimizers is None and not alone):
            self._optimizers = None
        else:
            self._optimizers = [*(self._optimizers or ()), *optimizers]
        self.outdated |= bool(self._planned)

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

    def room_bytes(self) -> int:
        """What the budget has room for beside every plan: what was set aside, and what the plans leave."""
        aside = 0 if self.options.reserve is None else parse_bytes(self.options.reserve)
        # The plan of a graph that others follow has set aside all that it can for them, and for what runs between them.
        last = [p.plan for p in self._planned if not p.frame.broken]
        return aside + min((plan.budget_bytes - plan.peak_bytes for plan in last), default=0)

    def close(self) -> None:
        """End the transfer threads and give the store back."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def gradients_are_kept(self) -> bool:
        """Whether any parameter of the model has a gradient now."""
        return any(p.grad is not None for ref in self._parameters if (p := ref()) is not None)

    def forget_plans(self) -> None:
        """Drop the plans, before the models are compiled anew."""
        self._planned.clear()
        self._counted.clear()
        self._fixed_budget = None
        self.outdated = False

    def begin_call(self, model: int) -> None:
        """Before each call of one of its models: plan anew where plans are out of date. Raises InfeasibleBudget where that does not end."""
        self._calling = model
        if self.outdated:
            self._rounds += 1
            if self._rounds > MOST_ROUNDS:
                worst = max(self._planned, key=self._with_others)
                raise InfeasibleBudget(
                    f"infeasible: the models of this session do not fit beside one another in {format_bytes(worst.plan.budget_bytes)}: "
                    f"they need {format_bytes(self._with_others(worst))}; raise the budget",
                    budget_bytes=worst.plan.budget_bytes,
                    floor_bytes=self._with_others(worst),
                    cause="what several models keep for their backward at once",
                )
            self.forget_plans()
            torch._dynamo.reset()

    # -- planning

    def plan(
        self, joint: JointGraph, inputs: list[InputInfo], examples: Sequence[Any], frame: Frame
    ) -> tuple[Captured, Plan]:
        """The captured graph of `frame` and its plan. Raises InfeasibleBudget when the budget cannot be met."""
        where = torch_device(examples)
        device = device_for(self.options, where)
        self.device_name = device.name
        here = [e for e in examples if isinstance(e, nn.Parameter)]
        part = self._part(examples)
        others = self._retained_by_others(part)
        surroundings = self._surroundings(joint, here, others + self._retained_elsewhere(frame))
        captured = capture(joint, inputs, surroundings)
        trains = any(op.phase is Phase.BACKWARD for op in captured.graph.ops)
        budget = self._budget(captured.graph, device, examples)
        if frame.broken:
            # What follows is unknown yet: leave it all the memory that can be freed between forward and backward.
            rest = max(surroundings.reserved_bytes, budget - _least_between(captured.graph))
            captured = capture(joint, inputs, replace(surroundings, reserved_bytes=rest))
        given = (e for e, info in zip(examples, inputs, strict=True) if info.kind is TensorKind.INPUT)
        with infeasible_for("training" if joint.tangents else "evaluation", given):
            plan = plan_graph(self.options, captured.graph, device, budget)
        retained = retained_bytes(captured.graph, plan.schedule)
        self._planned.append(_Planned(frame, part, plan, retained, others, tuple(id(p) for p in here)))
        self._check_whole(budget, here, frame)
        if trains:
            self._retained[part] = max(p.retained_bytes for p in self._planned if p.part == part)
        if any(self._with_others(p) > budget for p in self._planned) and not self.outdated:
            self.outdated = True
            warnings.warn(
                "this step keeps what several models need for backward at once, which the first plans did not know: it may "
                "take more than the budget; from the next step on the plans know it",
                stacklevel=2,
            )
        self._tell_of_other_sessions(where)
        return captured, plan

    def _retained_elsewhere(self, frame: Frame) -> int:
        """What the model's other frames leave between their forward and their backward: of each, the most of any plan."""
        found: dict[int, int] = {}
        for planned in self._planned:
            if planned.frame.id != frame.id and planned.part[0] == self._calling:
                found[planned.frame.id] = max(found.get(planned.frame.id, 0), planned.retained_bytes)
        return sum(found.values())

    def _retained_by_others(self, part: Part) -> int:
        """What the parts of other models leave between their forward and their backward, as far as is known."""
        return sum(nbytes for other, nbytes in self._retained.items() if other[0] != part[0])

    def _with_others(self, planned: _Planned) -> int:
        """The peak of a plan beside what is now known that others leave."""
        return planned.plan.peak_bytes - planned.others_bytes + self._retained_by_others(planned.part)

    def _tell_of_other_sessions(self, where: torch.device) -> None:
        """Warn where the plans of several sessions exceed the device together."""
        others = sum(
            s.peak_bytes for s in _SESSIONS if s is not self and any(ref() is not None for ref in s._parameters)
        )
        if others and self.peak_bytes + others > (whole := usable_bytes(where)):
            warnings.warn(
                f"what several sessions plan adds up to {format_bytes(self.peak_bytes + others)}, more than the "
                f"{format_bytes(whole)} of the device; give the models of one job one overspill.Session(budget=...)",
                stacklevel=2,
            )

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
        """The budget in bytes. One that follows from a step is fixed by the first that trains, and holds for all graphs."""
        if not self.options.limit.is_relative:
            return budget_for(self.options, graph, device, torch_device(examples))
        kind = (*self._part(examples), len(graph.ops))
        if kind not in self._counted and any(op.phase is Phase.BACKWARD for op in graph.ops):
            # Of several parts of the first step (several models, graph breaks), the one that needs the most counts.
            of_part = budget_for(self.options, graph, device, torch_device(examples))
            self._fixed_budget = max(self._fixed_budget or 0, of_part)
            self._counted.add(kind)
        if self._fixed_budget is None:
            return unmanaged_peak(graph, device)  # evaluation before training: nothing is known of the step yet
        return self._fixed_budget

    def _part(self, examples: Sequence[Any]) -> Part:
        return self._calling, *(id(e) for e in examples if isinstance(e, nn.Parameter))

    def _check_whole(self, budget: int, here: list[nn.Parameter], frame: Frame) -> None:
        """Refuse a further graph whose parameters' gradients no longer fit beside the backward of an earlier one."""
        for planned in self._planned:
            known = set(planned.parameters) | {id(p) for ref in self._parameters if (p := ref()) is not None}
            new = sum(2 * p.nbytes for p in here if id(p) not in known)
            if planned.frame.id != frame.id and planned.plan.peak_bytes + new > budget:
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
