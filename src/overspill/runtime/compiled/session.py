"""A session: the compiled models that share one budget.

It owns their store and the plans of all graphs that Dynamo finds in them.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes

from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph
from overspill.core import Device, TensorKind
from overspill.core.errors import InfeasibleBudget, UnsupportedError
from overspill.core.units import format_bytes, parse_bytes
from overspill.costs import MeasuredTimes
from overspill.plans.plan import Plan
from overspill.runtime import batches
from overspill.runtime.accelerator import empty_cache
from overspill.runtime.arena import Arenas
from overspill.runtime.hardware import usable_bytes
from overspill.runtime.live.pools import check_live, live_steps
from overspill.runtime.live.steps import LiveSteps, PoolReport
from overspill.runtime.options import (
    PLANNED,
    Options,
    device_for,
    infeasible_for,
    open_engine,
    plan_live,
    store_bytes,
    within_budget,
)
from overspill.runtime.peaks import PlannedPeaks
from overspill.runtime.profile import OpTimer
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.reserved import ReservedWatch
from overspill.runtime.surroundings import outputs_of, surroundings_of
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_memory import suit_heap

from .beside import ALONE, C, GraphProblem, HasGraph, Room, Settlement, is_summed, room_beside
from .bystanders import Bystanders
from .followed import Followed
from .in_force import Watch
from .pending import GraphKey, Part, PendingCalls
from .planned import GraphFrame, Planned, SessionStep
from .session_budget import SessionBudget

MOST_ROUNDS = 4
"""Most rounds of replanning because concurrent calls keep more than the plans assumed."""
MOST_WAITING = 1024
"""Calls for which outdated plans stay in use while any backward is pending."""
WORTHWHILE = 1.01
"""Slowdown of a plan from which on a better one is worth planning anew."""
TOGETHER = "keeps what several models need for backward at once"
_LOG = logging.getLogger("overspill")
_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


def plan_captured(options: Options, captured: HasGraph, device: Device, budget_bytes: int) -> Plan:
    """The plan of a captured graph. Raises InfeasibleBudget."""
    return plan_live(options, captured.graph, device, budget_bytes)


class Session(PlannedPeaks):
    """Compiled models that share one budget, one store and one transfer engine.

    Every graph of the models is planned within the budget. Several models of one job (a GAN, teacher and student) share
    a budget when they are given one session:

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
        self.clips = False
        """Whether gradients are clipped by their norm before the update, where that is known."""
        self.tracker: LiveBytes | None = None
        self.timer: OpTimer | None = None
        self.recorder: RunRecorder | None = None
        """The recorder of the running `overspill.record`, or None."""
        self.steps: LiveSteps | None = None
        """Drives the live pool through the steps, if the placement has one."""
        # The models' parameters, their plans, and the engine that carries these out.
        self.followed = Followed(parameters, optimizers)
        self._planned: list[Planned] = []
        self._engine: TransferEngine | None = None
        self._engine_number = 0
        self.device_name = ""
        self.watch_calls = Watch(options.on_unplanned)
        self._reserved = ReservedWatch()
        self._where = torch.device("cpu")
        # The budget, and when plans are out of date.
        self.arenas = Arenas()
        self.outdated = False
        """Whether to plan again, since something on the device is unknown to the plans."""
        self._budget = SessionBudget(self.options)
        self._keeps: Counter[GraphKey] = Counter()  # bytes kept for backward by the last plan of each kind of call
        self._rounds = 0
        self._steps: weakref.WeakSet[SessionStep] = weakref.WeakSet()
        self._waited = 0
        self._bystanders = Bystanders()
        self._ends: dict[Part, bool] = {}  # whether no loss is made of a graph's outputs but the one that it returns
        self._late: set[GraphKey] = set()  # kinds of calls whose inputs arrive while others are pending
        # Concurrent calls, and the room that each leaves to the others.
        self.pending = PendingCalls()
        self._problems: dict[GraphKey, GraphProblem[Any]] = {}
        self._rooms: dict[GraphKey, Room] = {}  # bytes reserved for concurrent calls
        self._settled: tuple[bool, dict[GraphKey, Counter[GraphKey]]] = False, {}
        self.replans = False
        """Whether `begin_call` is called before each model call, so that replanning is possible."""
        self._calling = 0  # which model is called, where there are several
        self._models = 0  # that were added
        _SESSIONS.add(self)

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters by weak reference; those that are gone are dropped."""
        self.followed.follow(parameters)

    def watch(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Register the module's parameters and its optimizer before the first call."""
        self.follow(module.parameters())
        self.followed.optimizers = [optimizer]

    def add(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] | None) -> None:
        """Add another model of the job.

        Without `optimizers`, those that step on its parameters are found.
        """
        self._models += 1
        self.followed.add(parameters, optimizers)
        self.outdated |= bool(self._planned)

    def add_step(self, step: SessionStep) -> None:
        """Add a `train_step` to the job.

        While it or a compiled model runs, the others keep their tensors of between steps on the device.
        """
        ours, itself = weakref.ref(self), weakref.ref(step)
        self._steps.add(step)
        step.join(lambda: 0 if (session := ours()) is None else session._kept_bytes(besides=itself()))
        self.outdated |= bool(self._planned)

    def _kept_bytes(self, besides: SessionStep | None = None) -> int:
        """Bytes that train steps and compiled models keep between steps."""
        steps = sum(step.kept_bytes() for step in self._steps if step is not besides)
        return steps if besides is None else steps + self.followed.kept_bytes()

    def place_live(self, where: str | torch.device = "cuda", budget_bytes: int = 0) -> None:
        """Serve each step's allocations from the live pool that `placement` names.

        On CUDA that is for all that PyTorch allocates. Raises RequestError where PyTorch has used the GPU already, and
        for a placement that cannot work there. Other placements change nothing. On the CPU the first plan calls this
        with its budget.
        """
        device, options = torch.device(where), self.options
        if not check_live(options.placement, options.backend, device):
            return
        if self.steps is None or (self.steps.allocator.device == "cuda") != (device.type == "cuda"):
            self.steps = live_steps(str(options.placement), device, budget_bytes)
            if device.type == "cpu":  # found in the middle of the first step
                self.steps.begin_step()

    @contextmanager
    def running(self) -> Iterator[RunRecorder | None]:
        """Run a planned graph; yields the recorder or None."""
        self.watch_calls.graphs_run += 1
        if self.recorder is not None:
            self.recorder.begin_step(self._where)
            if self._engine is not None:
                self._engine.recorder = self.recorder
        with nullcontext() if self.steps is None else self.steps.running():
            yield self.recorder

    # -- what a user may ask

    @property
    def plans(self) -> list[Plan]:
        """The current plans, one per graph, in the order they were made."""
        return [planned.plan for planned in self._planned]

    @property
    def train_steps(self) -> list[SessionStep]:
        """The train steps that share the budget."""
        return list(self._steps)

    @property
    def partitions(self) -> list[float | None]:
        """The `activation_memory_budget` of each plan's partition; None with eager kernels."""
        return [planned.partition for planned in self._planned]

    @property
    def engine(self) -> TransferEngine | None:
        """The transfer engine, once a plan has needed one."""
        return self._engine

    @property
    def device(self) -> torch.device:
        """The device that the models last ran on."""
        return self._where

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Measured op times so far, if the session profiles."""
        return self.timer.times(self.device_name) if self.timer is not None else None

    @property
    def pool(self) -> PoolReport | None:
        """Statistics of the live pool, once a step has run; else None."""
        return None if self.steps is None else self.steps.report()

    def room_bytes(self) -> int:
        """Bytes of the budget free alongside every plan, the reserve included."""
        aside = 0 if self.options.reserve is None else parse_bytes(self.options.reserve)
        # A graph before a graph break has reserved all it can for later graphs, and for what runs between them.
        last = [p.plan for p in self._planned if not p.frame.broken]
        return aside + min((plan.budget_bytes - plan.peak_bytes for plan in last), default=0)

    def close(self) -> None:
        """Stop the transfer threads and release the store."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def gradients_are_kept(self) -> bool:
        """Whether any parameter of the models has a gradient now."""
        return self.followed.gradients_are_kept()

    def forget_plans(self) -> None:
        """Drop all plans, before the models are compiled again."""
        self._planned.clear()
        self.arenas.give_back()
        empty_cache(self._where)  # what the plans before took, those to come may not count on
        self._budget.forget()
        self.outdated = False

    def begin_call(self, model: int) -> None:
        """Called before each model call: plan again where plans are outdated.

        Raises InfeasibleBudget where the plans do not settle within MOST_ROUNDS rounds.
        """
        self._calling = model
        if not self.outdated or not self._may_plan_anew():
            return
        if self.settle():
            self._rounds = 0  # new concurrency was seen, of which there is only so much
        # Give up after some rounds: what calls keep does not settle within this budget.
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            worst = max(self._planned, key=self._needs)
            raise InfeasibleBudget(
                f"infeasible: the models of this session do not fit beside one another in {format_bytes(worst.plan.budget_bytes)}: "
                f"they need {format_bytes(self._needs(worst))}; raise the budget",
                budget_bytes=worst.plan.budget_bytes,
                floor_bytes=self._needs(worst),
                cause="what several models keep for their backward at once",
            )
        # Compile again: each graph is then planned with what is known now.
        self.forget_plans()
        torch._dynamo.reset()

    def _may_plan_anew(self) -> bool:
        """Whether no step is under way, whose calls would be recompiled one by one."""
        self._waited += 1
        if len(self.pending) and self._waited < MOST_WAITING:
            return False
        self._waited = 0
        return True

    # -- planning

    def plan(
        self,
        joint: JointGraph,
        inputs: list[InputInfo],
        examples: Sequence[Any],
        frame: GraphFrame,
        capture: Callable[..., C],
        make: Callable[[Options, C, Device, int], Plan] = plan_captured,
    ) -> tuple[C, Planned]:
        """Capture the graph of `frame` with `capture` and plan it with `make`.

        Returns the captured graph and its plan. Raises InfeasibleBudget when the budget cannot be met.
        """
        where = joint.device
        device = device_for(self.options, where)
        self.device_name, self._where = device.name, where
        # Which call this is, and which others are pending when it runs.
        trains = bool(joint.tangents)
        here = [e for e in examples if isinstance(e, nn.Parameter)]
        part = self._part(examples)
        kind = GraphKey(part, (trains, *(batches.kind(e) for e in examples if not isinstance(e, nn.Parameter))))
        beside = self._known_beside(kind)
        retained = self._retained_elsewhere(frame)
        others = retained + sum(
            count * self._keeps[other] for other, count in beside.items() if other.part[0] != part[0]
        )
        # What the device holds outside this graph, and the budget left for it.
        batches_beside = self._beside(joint, inputs, examples)
        ends_in_loss = self.ends_in_loss(joint, examples, frame)
        surroundings = self._surroundings(
            joint, here, self._kept_bytes() + (0 if trains else others), batches_beside, ends_in_loss=ends_in_loss
        )
        problem = GraphProblem(joint, inputs, surroundings, self.options, device, frame.broken, capture, make)
        room = self._rooms.get(kind, Room(pending_bytes=others))
        if frame.broken and self.options.placement == PLANNED:
            raise UnsupportedError(
                "the model has a graph break, and planned addresses are for a model in one graph: pass fullgraph=True, "
                'which says where it breaks, or leave placement="planned" out'
            )
        if frame.broken:
            problem = problem.as_one_of_several()
        budget = self._budget.bytes_for(problem, room, kind, where, is_settled=kind in self._rooms, plans=self.plans)
        given = [i for i, info in enumerate(inputs) if info.kind is TensorKind.INPUT]
        with infeasible_for("training" if trains else "evaluation", (examples[i] for i in given)):
            captured, plan, room, budget = self._made(problem, kind, room, budget, retained)
        # Set the live pool's limit and record the plan.
        if where.type == "cpu":
            self.place_live(where, budget)
        if self.steps is not None:
            self.steps.limit_for(plan, budget)
        planned = Planned(
            frame, kind, plan, plan.retained_bytes - room.pending_bytes, room,
            tuple(id(p) for p in here), tuple(given), beside, surroundings.reserved_bytes,
        )  # fmt: skip
        planned.made_into_loss, planned.ends_in_loss = self._made_into_loss(joint, frame), ends_in_loss
        self._planned.append(planned)
        self._check_whole(budget, here, frame)
        if trains:
            self._problems[kind] = problem.as_one_of_several()
            self._keeps[kind] = planned.retained_bytes
            # An evaluation before training may have taken more than what is now the budget.
            self.outdated |= any(p.plan.peak_bytes > budget for p in self._planned)
        self._tell_of_other_sessions(where)
        return captured, planned

    def captured_again(self, planned: Planned, joint: JointGraph) -> Iterable[Captured]:
        """The captures that `planned` was chosen from, of another trace of the same part."""
        problem = replace(self._problems[planned.kind], joint=joint)
        captures: Iterable[Captured] = problem.captured(planned.room, planned.plan.budget_bytes)
        return captures

    def _made(
        self, problem: GraphProblem[C], kind: GraphKey, room: Room, budget: int, retained: int
    ) -> tuple[C, Plan, Room, int]:
        """A captured graph, its plan, its room for concurrent calls, and the budget.

        Room and budget may differ from those given, where these are too small. The model's other frames keep `retained`
        bytes. Raises InfeasibleBudget.
        """
        trains = bool(problem.joint.tangents)
        try:
            return *self._within(problem, room if trains else ALONE, budget), room, budget
        except InfeasibleBudget as error:
            if self.options.limit.smallest:
                budget = self._budget.grow(problem, room if trains else ALONE, error)
            elif trains and kind in self._rooms:
                room = self._settled_again(problem, kind)
            elif trains and (beside := self._known_beside(kind)):
                # The others were planned as if they were alone. From the next step on they leave room to one another.
                room = Room(pending_bytes=retained)
                self.pending.learn(kind, beside)
                self._plan_anew(TOGETHER)
            elif trains and retained:
                raise error.with_floor(self._enough(problem, error.floor_bytes)) from None
            else:
                raise
        return *self._within(problem, room if trains else ALONE, budget), room, budget

    def _enough(self, problem: GraphProblem[Any], budget: int) -> int:
        """A budget in bytes that also fits what earlier frames of the model keep."""
        before = {p.frame.id: self._problems[p.kind] for p in self._planned if self._is_before(p)}
        while True:
            pending = 0
            try:
                for each in (*before.values(), problem):
                    pending = self._within(each, Room(pending_bytes=pending), budget)[1].retained_bytes
            except InfeasibleBudget as error:
                budget = max(error.floor_bytes, budget + 1)
            else:
                return budget

    def _within(self, problem: GraphProblem[C], room: Room, budget: int) -> tuple[C, Plan]:
        """Capture and plan within `budget` bytes; on CUDA that of a card.

        Raises InfeasibleBudget.
        """
        if room != ALONE:
            problem = problem.as_one_of_several()
        return within_budget(problem.options, problem.device, budget, lambda live: problem.planned(room, live))

    def _known_beside(self, kind: GraphKey) -> Counter[GraphKey]:
        """Concurrent calls that a call of `kind` must leave room for.

        Those that were settled, else what has been seen of other models.
        """
        seen = self.pending.beside.get(kind, Counter())
        if kind in self._rooms:
            return Counter(seen)
        return Counter({k: n for k, n in (seen | self.pending.others(None)).items() if k.part[0] != kind.part[0]})

    def _plan_anew(self, what: str) -> None:
        """Mark the plans outdated, and warn that this step may exceed the budget.

        `what` says what the step does that the plans do not know.
        """
        if not self.outdated:
            self.outdated = True
            later = (
                "from the next step on the plans know it" if self.replans else "overspill.compile would plan anew then"
            )
            warnings.warn(
                f"this step {what}, which the first plans did not know: it may take more than the budget; {later}",
                stacklevel=3,
            )

    def see(self, planned: Planned, args: Sequence[Any] = (), call: weakref.ref[Node] | None = None) -> None:
        """Note which other calls are pending when a planned graph runs.

        Called before forward, with `args`, and before backward, with its `call`.
        """
        self._reserved.look(lambda: self.reserved_bytes, self._where)
        beside = self.pending.others(call)
        if beside <= planned.beside:
            return
        # More calls are concurrent than the plan knew.
        planned.beside |= beside
        if any(isinstance(args[i], Tensor) and args[i] not in self._bystanders for i in planned.given if args):
            self._late.add(planned.kind)
        self.pending.learn(planned.kind, planned.beside)
        # Plan again if any of them no longer fits.
        together = [planned, *(p for p in self._planned if p.kind in beside)]
        if planned.beside.keys() <= self._problems.keys() and any(
            self._needs(p) > p.plan.budget_bytes for p in together
        ):
            several = len({kind.part[0] for kind in planned.beside} | {planned.part[0]}) > 1
            calls = f"calls a model {planned.beside.total() + 1} times before their backwards"
            self._plan_anew(TOGETHER if several else calls)

    def _made_into_loss(self, joint: JointGraph, frame: GraphFrame) -> frozenset[int]:
        """The outputs that the graph makes into a loss which it returns, where that may be the only one."""
        return frozenset() if self.options.reserve is not None or frame.broken else joint.made_into_loss

    def ends_in_loss(self, joint: JointGraph, examples: Sequence[Any], frame: GraphFrame) -> bool:
        """Whether it is known that the graph returns the only loss."""
        return bool(self._made_into_loss(joint, frame)) and self._ends.get(self._part(examples), False)

    def take_for_only_loss(self, joint: JointGraph, examples: Sequence[Any], frame: GraphFrame) -> bool:
        """Take the loss that the graph returns for the only one; False if there is none, or another has been seen."""
        return bool(self._made_into_loss(joint, frame)) and self._ends.setdefault(self._part(examples), True)

    def see_gradients(self, planned: Planned, given: Sequence[Any]) -> None:
        """Note the gradients that autograd passes to a backward: whether the loss that the graph returns is the only one."""
        is_only, known = all(given[i] is None for i in planned.made_into_loss), self._ends.get(planned.part)
        if known is False or known is is_only:
            return
        self._ends[planned.part], self._rounds = is_only, 0
        if not is_only and planned.ends_in_loss:
            self._plan_anew("makes a loss from outputs of a model that returns one itself")
        elif is_only and self.replans and planned.plan.slowdown > WORTHWHILE:
            self.outdated = True  # its plan has room for another loss, and for gradients of what that is made from

    def _needs(self, planned: Planned) -> int:
        """Peak bytes of a plan with all calls known to be concurrent with it."""
        room, problem = planned.room, self._problems.get(planned.kind)
        sums = is_summed(planned.kind, self.pending.beside)
        needed = room_beside(planned.kind, planned.beside, self._problems, self._keeps, sums=sums)
        more = needed.pending_bytes - room.pending_bytes + max(0, needed.loss_bytes - room.loss_bytes)
        if needed.sums and not room.sums and problem is not None:
            more += problem.gradient_bytes
        return planned.least_peak_bytes + more

    def settle(self) -> bool:
        """Settle how many bytes concurrent calls leave to one another.

        Returns whether anything changed. Raises InfeasibleBudget where they do not fit together.
        """
        known = {kind: others for kind, others in self.pending.beside.items() if others}
        if (self.accumulates, known) == self._settled:
            return False
        self._settled = self.accumulates, dict(known)
        self._problems = {kind: self._as_known(kind, problem) for kind, problem in self._problems.items()}
        self._make_room(known)
        return True

    def _settled_again(self, problem: GraphProblem[Any], kind: GraphKey) -> Room:
        """The room of a call with more concurrent calls than rooms were settled for.

        Raises InfeasibleBudget as `settle` does.
        """
        self._problems[kind] = self._as_known(kind, problem)
        self._make_room({kind: others for kind, others in self.pending.beside.items() if others})
        self.outdated = True  # the other plans are for the rooms before
        return self._rooms.get(kind, ALONE)

    def _make_room(self, known: dict[GraphKey, Counter[GraphKey]]) -> None:
        settlement = Settlement(self._problems, known)
        if settlement.kinds:
            self._rooms = settlement.rooms(self._budget.settle(settlement, self.plans))

    def _as_known(self, kind: GraphKey, problem: GraphProblem[Any]) -> GraphProblem[Any]:
        """`problem` updated with what has been seen of its calls since."""
        around = replace(problem.surroundings, accumulates=self.accumulates)
        return replace(problem, late=kind in self._late, surroundings=around)

    def _retained_elsewhere(self, frame: GraphFrame) -> int:
        """Bytes that the model's other frames keep between forward and backward.

        Of each frame, the most of any plan.
        """
        found: dict[int, int] = {}
        for planned in self._planned:
            if planned.frame.id != frame.id and self._is_before(planned):
                found[planned.frame.id] = max(found.get(planned.frame.id, 0), planned.retained_bytes)
        return sum(found.values())

    def _is_before(self, planned: Planned) -> bool:
        """Whether it belongs to the model being called, and may keep something for backward."""
        return planned.part[0] == self._calling and planned.kind in self._problems

    def _tell_of_other_sessions(self, where: torch.device) -> None:
        """Warn where the plans of several sessions together exceed the device."""
        others = sum(s.peak_bytes for s in _SESSIONS if s is not self and s.followed.parameters)
        if others and self.peak_bytes + others > (whole := usable_bytes(where)):
            warnings.warn(
                f"what several sessions plan adds up to {format_bytes(self.peak_bytes + others)}, more than the "
                f"{format_bytes(whole)} of the device; give the models of one job one overspill.Session(budget=...)",
                stacklevel=2,
            )

    def engine_for(self, plan: Plan, device: torch.device) -> int:
        """The transfer engine's number, with store space for what `plan` offloads."""
        if device.type == "cpu":
            suit_heap(plan.unmanaged_peak_bytes)
        if self._engine is None:
            self._engine, self._engine_number = open_engine(self.options, device)
            weakref.finalize(self, self._engine.close_dropped)
        with _disable_current_modes():  # AOTAutograd calls us in its fake mode; the store is real
            self._engine.store.reserve(store_bytes(plan))
        return self._engine_number

    def _beside(self, joint: JointGraph, inputs: list[InputInfo], examples: Sequence[Any]) -> list[int]:
        """Bytes of each batch on the device outside the graph, if the loss is."""
        outputs = outputs_of(joint)
        if not joint.tangents or not outputs or self.options.reserve is not None:
            return []
        if not len(self.pending):
            given = (e for e, info in zip(examples, inputs, strict=True) if info.kind is TensorKind.INPUT)
            self._bystanders.look([e for e in given if isinstance(e, Tensor)], outputs)
        return self._bystanders.sizes(besides=[e for e in examples if isinstance(e, Tensor)])

    def _surroundings(
        self,
        joint: JointGraph,
        here: list[nn.Parameter],
        retained_bytes: int,
        beside: Sequence[int],
        *,
        ends_in_loss: bool,
    ) -> Surroundings:
        return surroundings_of(
            joint, here, self.followed.parameters, self.followed.optimizers, self.options.reserve,
            retained_bytes=retained_bytes, accumulates=self.accumulates, clips=self.clips, beside=beside,
            ends_in_loss=ends_in_loss,
        )  # fmt: skip

    def _part(self, examples: Sequence[Any]) -> Part:
        return self._calling, *(id(e) for e in examples if isinstance(e, nn.Parameter))

    def _check_whole(self, budget: int, here: list[nn.Parameter], frame: GraphFrame) -> None:
        """Refuse a later graph whose gradients do not fit alongside an earlier backward.

        Raises InfeasibleBudget.
        """
        for planned in self._planned:
            known = set(planned.parameters) | {id(p) for p in self.followed.parameters}
            # Twice: parameter and gradient.
            new = sum(2 * p.nbytes for p in here if id(p) not in known)
            if new and planned.frame.id != frame.id and planned.least_peak_bytes + new > budget:
                raise InfeasibleBudget(
                    f"infeasible: the model has several graphs, and {format_bytes(new)} of parameters and gradients of a later "
                    f"one do not fit beside the first one's peak of {format_bytes(planned.least_peak_bytes)} in "
                    f"{format_bytes(budget)}; use overspill.compile(model, ...), which sees all parameters at once",
                    budget_bytes=budget,
                    floor_bytes=planned.least_peak_bytes + new,
                    cause="parameters and gradients of a later graph",
                )


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for session in list(_SESSIONS):
        if session.gradients_are_kept() and session.followed.updated_by(optimizer):
            session.watch_calls.check_step(optimizer)


register_optimizer_step_pre_hook(_before_step)
