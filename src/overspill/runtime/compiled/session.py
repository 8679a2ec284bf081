"""A session: one compiled model, its budget, its store, and the plans of all graphs that Dynamo finds in it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings, capture
from overspill.capture.compiled.joint import JointGraph, storage_bytes
from overspill.core import Device, Graph, TensorKind, Verb
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.core.units import format_bytes, is_share, parse_bytes
from overspill.costs import MeasuredTimes
from overspill.devices import load_device
from overspill.placement.packing import DEFAULT, solver_named
from overspill.placement.place import check_placer, plan_within
from overspill.planning.gaps import swappable_gaps
from overspill.planning.step_program import StepProgram
from overspill.policies import policy_named
from overspill.policies.plan import Plan, make_plan, retained_bytes, unmanaged_peak
from overspill.runtime.hardware import device_noun, usable_bytes
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.planned_steps import PlannedSteps
from overspill.runtime.optimizers import OptimizerNeeds, find_optimizers, optimizer_needs
from overspill.runtime.parallel import bucket_bytes
from overspill.runtime.profile import OpTimer
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine, make_engine
from overspill.runtime.transfer.host_memory import economise
from overspill.runtime.transfer.ops import register_engine
from overspill.runtime.transfer.stores import make_store, whole_pages

BACKENDS = ("eager", "inductor")
PLANNED = "planned"
"""The placement by a solver, whose addresses are the real ones on CUDA."""


@dataclass(frozen=True)
class Options:
    """What the user asked for. `budget` is a size, a share of the unmanaged peak, or None for all of the device's memory.

    `reserve` is set aside for what runs between the model's forward and backward (a loss outside the model, say);
    None means twice the size of the model's differentiable outputs. `transfers=False` keeps what would be offloaded,
    with the same saved tensors and recomputations: the reference for Inductor. `times` are op times measured before,
    `profile=True` measures them (on the eager backend). `placement` names the allocator or solver within whose peak a
    plan has to stay, or is `planned`; without it live bytes count.
    """

    budget: str | float | None = None
    policy: str = "auto"
    store: str | None = None
    store_dir: str | Path | None = None
    backend: str = "eager"
    device: str | Device | None = None
    reserve: str | float | None = None
    times: MeasuredTimes | None = None
    transfers: bool = True
    profile: bool = False
    placement: str | None = None
    checksum: bool = False

    def __post_init__(self) -> None:
        """Refuse at once what could only fail later."""
        policy_named(self.policy)
        if self.budget is not None:
            parse_bytes(self.budget, of_bytes=1 << 40)
        if self.reserve is not None:
            parse_bytes(self.reserve)
        if self.backend not in BACKENDS:
            raise RequestError(f"unknown backend {self.backend!r}; backends: {', '.join(BACKENDS)}")
        if self.profile and self.backend != "eager":
            raise RequestError("op times are measured on the eager backend; Inductor fuses ops")
        if self.placer is not None:
            check_placer(self.placer)

    @property
    def placer(self) -> str | None:
        """The allocator or solver that plans are placed by: for `planned` the solver that is the default."""
        return DEFAULT if self.placement == PLANNED else self.placement


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
        self._parameters = [weakref.ref(p) for p in parameters]
        self._optimizers = optimizers
        self._planned: list[_Planned] = []
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self.device_name = ""

    def watch(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Tell the session of the module's parameters and the optimizer, before the first call."""
        self._parameters = [weakref.ref(p) for p in module.parameters()]
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
            rest = max(surroundings.rest_bytes, budget - _least_between(captured.graph))
            captured = capture(joint, inputs, replace(surroundings, rest_bytes=rest))
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

    def _surroundings(self, joint: JointGraph, here: list[nn.Parameter], retained: int) -> Surroundings:
        known = {id(p): p for ref in self._parameters if (p := ref()) is not None} | {id(p): p for p in here}
        optimizers = self._optimizers if self._optimizers is not None else find_optimizers(list(known.values()))
        known |= {id(p): p for o in optimizers for group in o.param_groups for p in group["params"]}
        needs: OptimizerNeeds = optimizer_needs(optimizers)
        inside = {id(p) for p in here}
        outside = [p for key, p in known.items() if key not in inside]
        reserve = self.options.reserve
        return Surroundings(
            optimizer_state_bytes=needs.state_bytes,
            update_bytes=needs.update_bytes,
            rest_bytes=_outside_loss_bytes(joint) if reserve is None else parse_bytes(reserve),
            accumulates=self.accumulates,
            elsewhere=(
                (TensorKind.PARAMETER, sum(p.nbytes for p in outside)),
                (TensorKind.GRADIENT, sum(p.nbytes for p in outside if p.requires_grad)),
                (TensorKind.ACTIVATION, retained),
                (TensorKind.COMMUNICATION, bucket_bytes()),
            ),
        )

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


def device_for(options: Options, where: torch.device) -> Device:
    """The device to plan for: the one that was asked for, or the one that tensors are on."""
    if isinstance(options.device, Device):
        return options.device
    return load_device(options.device) if options.device is not None else device_noun(where)


def budget_for(options: Options, graph: Graph, device: Device, where: torch.device) -> int:
    """The budget in bytes: what was asked for, as a size or as a share of the unmanaged peak, or the whole device."""
    if options.budget is None:
        return device.usable_bytes if options.device else usable_bytes(where)
    of_bytes = unmanaged_peak(graph, device) if is_share(options.budget) else None
    return parse_bytes(options.budget, of_bytes=of_bytes)


def open_engine(options: Options, where: torch.device) -> tuple[TransferEngine, int]:
    """An engine with a store as asked for, for tensors on `where`, and the number by which lowered graphs call it.

    Raises RequestError and StoreError.
    """
    store = make_store(options.store, where, options.store_dir)
    engine = make_engine(store, where, checksum=options.checksum)
    return engine, register_engine(engine)


def plan_graph(options: Options, graph: Graph, device: Device, budget_bytes: int) -> Plan:
    """The plan of `graph`. Raises InfeasibleBudget."""
    if options.placer is None:
        return make_plan(graph, device, options.policy, budget_bytes, options.times)
    return plan_within(graph, device, options.policy, budget_bytes, options.placer, options.times).plan


def torch_device(examples: Sequence[Any]) -> torch.device:
    """The device of the first tensor among `examples`."""
    return next((e.device for e in examples if isinstance(e, Tensor)), torch.device("cpu"))


def _outside_loss_bytes(joint: JointGraph) -> int:
    """Twice the size of what the caller differentiates outside the graph: a loss saves its input's size and makes it again."""
    outputs = {n for n in joint.forward_outputs if isinstance(n, fx.Node)} - set(joint.write_backs.values())
    sizes: dict[int, int] = {}
    for node in outputs:
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_floating_point() and node.meta["val"].dim():
            sizes.update(storage_bytes(node))
    return 2 * sum(sizes.values()) if joint.tangents else 0


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


def store_bytes(plan: Plan) -> int:
    """Store bytes that one step of `plan` needs, each tensor rounded up to pages."""
    stored = dict.fromkeys((*plan.schedule.stored, *plan.schedule.targets(Verb.OFFLOAD)))
    return sum(whole_pages(plan.graph.tensors[t].nbytes) for t in stored)
