"""A session: the compiled models that share one budget.

It owns their store and the plans of all graphs that Dynamo finds in them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overspill.capture.compiled.graph import Captured, InputInfo
from overspill.capture.compiled.joint import JointGraph
from overspill.core import TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.core.units import format_bytes, parse_bytes
from overspill.costs import MeasuredTimes
from overspill.plans.plan import Plan
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.dynamo import reset_dynamo
from overspill.runtime import batches
from overspill.runtime.accelerator import empty_cache
from overspill.runtime.arena import Arenas
from overspill.runtime.hardware import account_of, device_named, usable_bytes
from overspill.runtime.options import PLANNED, Options
from overspill.runtime.parking import Parked
from overspill.runtime.peaks import PlannedPeaks
from overspill.runtime.profile import OpTimer
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.reserved import ReservedWatch
from overspill.runtime.step.away import Away
from overspill.runtime.step.from_host import held_bytes
from overspill.runtime.surroundings import outputs_of, surroundings_of
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_memory import suit_heap
from overspill.runtime.transfer.ops import open_engine
from overspill.runtime.transfer.stores import store_bytes
from overspill.runtime.transfer.tiers import directories_of

from .concurrent_plans import C, GraphProblem
from .graph_plans import GraphPlans
from .loop_plans import MOVES_PARAMETERS, LoopPlans
from .only_loss import OnlyLosses
from .pending_calls import GraphFrame, GraphKey, Part, PendingCalls
from .plan_check import PlanCheck
from .planned import Planned, SessionStep
from .renewal import Renewal
from .routed_rows import RoutedRows
from .sharded import ShardedModel
from .step_check import check_step
from .weak_references import WeakReferences

_SESSIONS: weakref.WeakSet[Session] = weakref.WeakSet()


class Session(PlannedPeaks):
    """Compiled models that share one budget, one store and one transfer engine.

    Every graph of the models is planned within the budget. Several models of one job (a GAN, teacher and student) share
    a budget if they get one session:

        session = overspill.Session(budget="8GiB")
        generator, critic = (overspill.compile(m, session=session) for m in (generator, critic))

    The keyword arguments are those of `overspill.compile`.
    """

    def __init__(
        self,
        options: Options | None = None,
        parameters: Iterable[Tensor] = (),
        optimizers: Sequence[Optimizer] | None = None,
        **asked: Any,
    ) -> None:
        """Create a session. Raises RequestError for options that cannot be right."""
        self.options = Options(**asked) if options is None else options
        options = self.options
        self.clips = False
        """Whether gradients are clipped by their norm before the update, where that is known."""
        self.tracker: LiveBytes | None = None
        self.timer: OpTimer | None = None
        self.recorder: RunRecorder | None = None
        """The recorder of the running `overspill.record`, or None."""
        # The models and train steps that share the budget.
        self.followed = WeakReferences(parameters, optimizers)
        self._steps: weakref.WeakSet[SessionStep] = weakref.WeakSet()
        self.loop = LoopPlans(self.followed, options)
        self.sharded: ShardedModel | None = None
        """The model of the session that `fully_shard` has sharded."""
        self._calling = 0  # which model is called, where there are several
        self.rows: RoutedRows | None = None
        """What watches the rows that values choose in the call that runs."""
        # Their plans, and what these are made by.
        self.renewal = Renewal()
        self.watch_calls = PlanCheck(options.on_unplanned, self.renewal)
        self._plans = GraphPlans(options, self.renewal, self.loop, self.watch_calls.needs_aside)
        self.losses = OnlyLosses(self.renewal, reserved=options.reserve is not None)
        # What carries the plans out.
        self._engines: dict[str, tuple[TransferEngine, int]] = {}
        """By kind of device, with their numbers: a model on a GPU may have graphs of the host's numbers."""
        self.arenas = Arenas()
        self._parked = Parked(directories_of(options.store_dir)[0])
        self.device_name = ""
        self._where = torch.device("cpu")
        self._reserved = ReservedWatch()
        _SESSIONS.add(self)

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Add parameters by weak reference, and drop those that are gone."""
        self.followed.follow(parameters)

    def watch(self, module: nn.Module, optimizer: Optimizer) -> None:
        """Register the module's parameters and its optimizer before the first call."""
        self.follow(module.parameters())
        self.followed.optimizers = [optimizer]

    def add(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] | None) -> None:
        """Add another model of the job.

        Without `optimizers`, those that step on its parameters are found.
        """
        self.followed.add(parameters, optimizers)
        self.renewal.is_asked |= bool(self.plans)

    def add_step(self, step: SessionStep) -> None:
        """Add a `train_step` to the job.

        While it or a compiled model runs, the others keep on the device the tensors that they hold between steps.
        """
        ours, itself = weakref.ref(self), weakref.ref(step)
        self._steps.add(step)
        step.join(lambda: 0 if (session := ours()) is None else session._kept_bytes(besides=itself()))
        self.renewal.is_asked |= bool(self.plans)

    def _kept_bytes(self, besides: SessionStep | None = None) -> int:
        """Return the bytes that train steps and compiled models keep between steps.

        Those of the step `besides` do not count. The compiled models count only if it is given.
        """
        steps = sum(step.kept_bytes() for step in self._steps if step is not besides)
        return steps if besides is None else steps + self.followed.kept_bytes()

    def begin_graph(self) -> RunRecorder | None:
        """Begin a planned graph, and return the recorder to notify, or None."""
        self.watch_calls.graphs_run += 1
        if self.recorder is not None:
            self.recorder.begin_step(self._where)
            for engine, _ in self._engines.values():
                engine.recorder = self.recorder
        return self.recorder

    # -- what a user may ask

    @property
    def plans(self) -> list[Plan]:
        """The current plans, one per graph, in the order they were made."""
        return self._plans.plans

    @property
    def steps_over(self) -> int:
        """How many steps did what their plans did not know; each warned.

        They may have taken more than the budget, but for those that began again by plans for more rows.
        """
        return self.renewal.steps_over

    @property
    def train_steps(self) -> list[SessionStep]:
        """The train steps that share the budget."""
        return list(self._steps)

    @property
    def partitions(self) -> list[float | None]:
        """The `activation_memory_budget` of each plan's partition; None with eager kernels."""
        return [planned.partition for planned in self._plans.planned]

    @property
    def engine(self) -> TransferEngine | None:
        """The transfer engine, once a plan has needed one."""
        found = self._engines.get(self._where.type) or next(iter(self._engines.values()), None)
        return found and found[0]

    @property
    def device(self) -> torch.device:
        """The device that the models last ran on."""
        return self._where

    @property
    def measured_times(self) -> MeasuredTimes | None:
        """Measured op times so far, if the session profiles."""
        return self.timer.times(self.device_name) if self.timer is not None else None

    def room_bytes(self) -> int:
        """Return the bytes of the budget that every plan leaves free, the reserve included."""
        aside = 0 if self.options.reserve is None else parse_bytes(self.options.reserve)
        # A graph before a graph break has reserved all it can for later graphs, and for what runs between them.
        last = [p.plan for p in self._plans.planned if not p.frame.broken]
        return aside + min((plan.asked_bytes - plan.needed_bytes for plan in last), default=0)

    def between_bytes(self) -> int:
        """Return the bytes of the budget that every plan leaves free between forward and backward."""
        trained = [(p, p.plan) for p in self._plans.planned if p.kind.inputs[0]]
        most = (plan.asked_bytes - plan.needed_bytes + plan.peak_bytes - p.between_bytes for p, plan in trained)
        return min(most, default=0)

    def move_all(self, latest: Planned) -> None:
        """Let parameters move from now on; calls that wait for their backward keep them on the device."""
        state = self.loop.state
        assert state is not None
        state.enter()
        state.kept |= state.waiting()
        state.is_between |= bool(state.kept)
        if any(planned is not latest and planned.kind.inputs[0] for planned in self._plans.planned):
            self.renewal.is_asked = True
            self.renewal.begin_rounds()

    def shard(self, module: nn.Module) -> ShardedModel | None:
        """Return `module` as one that is sharded, or None if it is not. Raises UnsupportedError."""
        if self.sharded is not None and self.sharded.is_of(module):
            return self.sharded
        found = ShardedModel.of(module)
        if found is not None:
            if self.sharded is not None or self.options.backend != "eager":
                raise UnsupportedError(
                    "a session has one model that fully_shard has sharded, with the eager backend; use "
                    "overspill.train_step for others"
                )
            self.sharded, self.loop.may_move = found, False
            self.loop.why_not = "fully_shard has given each rank its part of them"
        return found

    def synchronize(self) -> None:
        """Bring all parameters and optimizer state back to the device, until the next call."""
        if (state := self.loop.state) is not None:
            state.gate.alone(state.synchronize)
            state.was_asked = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Hold all parameters and optimizer state on the device, and let no other thread step, within the context."""
        state = self.loop.state
        reading = None if state is None else state.gate.reading(for_long=True)
        self.synchronize()
        try:
            yield
        finally:
            del reading

    def park(self) -> int:
        """Give the device to another program, as an inference engine between two phases of training.

        Parameters, buffers, gradients and optimizer state go to host memory, where they can be read, and the arenas of
        plans are given back. The next call of a model or of an optimizer's `step` brings all back, as `unpark` does.

        Returns:
            The bytes that have left the device.

        Raises:
            RequestError: Between a forward and its backward.
            StoreError: If host memory has no room. What has not moved is still on the device.
        """
        if len(self.pending):
            raise RequestError("park() between a forward and its backward; call it behind the optimizer's step")
        sent = self.loop.park()
        here = (tensor for _, tensors in self.followed.present() for tensor in tensors)
        for tensors in (here, self.loop.buffers()):
            sent += self._parked.send((t for t in tensors if not isinstance(t, Away)), self._where)
        self.arenas.give_back()
        empty_cache(self._where)
        return sent

    def unpark(self, budget: str | float | None = None) -> None:
        """Bring back what `park` has moved; with `budget`, plan for another one from now on.

        Raises RequestError for a budget that cannot be right, and what a call of a model raises if it cannot be met.
        """
        if budget is not None:
            self.options = replace(self.options, budget=budget)
            self._plans.ask(self.options)
            self.renewal.is_asked = True
            self.renewal.begin_rounds()
        self._parked.bring()

    def close(self) -> None:
        """Bring everything back, stop the transfer threads and release the store."""
        self._parked.bring()
        self.loop.close()
        for engine, _ in self._engines.values():
            engine.close()
        self._engines.clear()

    # -- before each call

    @property
    def pending(self) -> PendingCalls:
        """The calls whose backward is still to come."""
        return self._plans.calls.pending

    @property
    def accumulates(self) -> bool:
        """Whether gradients of the step before exist in forward, which the plans then count."""
        return self._plans.accumulates

    @accumulates.setter
    def accumulates(self, value: bool) -> None:
        self._plans.accumulates = value

    def gradients_are_kept(self) -> bool:
        """Return whether any parameter of the models has a gradient now."""
        return self.followed.gradients_are_kept()

    def begin_call(self, model: int, given: Any = ()) -> None:
        """Plan again before a model call if plans are outdated.

        All ranks of a sharded model, which is called with `given`, plan again if one must. Raises InfeasibleBudgetError
        if the plans do not settle within some rounds, and RequestError if ranks differ.
        """
        self._calling = model
        self._parked.bring()
        if self.plans and torch.is_grad_enabled() and self.followed.train():
            self.renewal.is_asked = True  # those there are do not count its state, which stays when it is frozen again
            self.renewal.begin_rounds()
        if self.loop.begin():
            self.renewal.is_asked = True
            self.renewal.begin_rounds()
        elif self.plans and not self.renewal.is_asked:
            self.loop.tell_of_more_than(max(plan.budget_bytes for plan in self.plans))
        if self.loop.from_host_to is not None and self.loop.state is None:
            self.loop.begin_on_host(*self._engine_on(self.loop.from_host_to))
        is_due = self.renewal.is_due(len(self.pending))
        if self.sharded is not None:
            is_due = self.sharded.begin_call(given, accumulates=self.accumulates, is_due=is_due)
        if is_due:
            self._plans.renew()
            self._compile_again()

    @contextmanager
    def watching(self, rows: RoutedRows) -> Iterator[None]:
        """Let `rows` see what runs between planned graphs within the context; not where ranks run one plan."""
        around, self.rows = self.rows, rows if self.sharded is None else None
        try:
            yield
        finally:
            self.rows = around

    @contextmanager
    def graph_runs(self, args: Sequence[Any], changed: Iterable[int], *, broken: bool) -> Iterator[list[Any]]:
        """Watch no rows in the context, in which a planned graph runs on `args`; the caller adds its outputs.

        It changes those at the positions `changed` in place. If it is `broken`, what is behind it is watched.
        """
        made: list[Any] = []
        if self.rows is not None:
            self.rows.pause(args[position] for position in changed)
        yield made
        if self.rows is not None and broken:
            self.rows.resume(args, made)

    def begin_again(self) -> None:
        """Plan again before a call that has been undone runs again. Raises InfeasibleBudgetError."""
        self.renewal.begin_rounds()
        self._plans.renew()
        self._compile_again()
        self.begin_call(self._calling)

    def notice_kept_gradients(self) -> None:
        """Plan once more before a model call if gradients of an earlier backward still exist."""
        if not self.accumulates and torch.is_grad_enabled() and self.gradients_are_kept():
            self.accumulates = True
            if self.plans:
                self._plans.settle()
                self._plans.forget()
                self._compile_again()

    def _compile_again(self) -> None:
        """Make each graph be planned again, with present knowledge."""
        self.arenas.give_back()
        empty_cache(self._where)  # what the plans before took, those to come may not count on
        self.watch_calls.begin_plans()
        reset_dynamo()

    # -- planning

    def plan(
        self,
        joint: JointGraph,
        inputs: list[InputInfo],
        examples: Sequence[Any],
        frame: GraphFrame,
        capture: Callable[..., C],
        make: Callable[[GraphProblem[C], C, int], Plan],
    ) -> tuple[C, Planned]:
        """Capture the graph of `frame` with `capture` and plan it with `make`.

        Returns the captured graph and its plan. Raises InfeasibleBudgetError if the budget cannot be met.
        """
        where = joint.device
        account = account_of(self.options, device_named(self.options.device, where), where)
        on_host = self.loop.from_host_to is not None  # otherwise the graph runs where the model is
        account = replace(account, model_on_host=on_host)
        self.device_name, self._where = account.device.name, where
        if frame.broken and self.options.placement == PLANNED:
            raise UnsupportedError(
                "the model has a graph break, and planned addresses are for a model in one graph: pass fullgraph=True, "
                'which says where it breaks, or leave placement="planned" out'
            )
        # Which call this is, and what the device holds outside its graph.
        here = [self.sharded.shard(e) if self.sharded else e for e in examples if isinstance(e, nn.Parameter)]
        part, trains = self.part(examples), bool(joint.tangents)
        self.followed.train()
        kind = GraphKey(part, (trains, *(batches.kind(e) for e in examples if not isinstance(e, nn.Parameter))))
        given = [i for i, info in enumerate(inputs) if info.kind is TensorKind.INPUT]
        ends_in_loss = self.losses.is_only(joint, part, frame)
        others = 0 if trains else self._plans.kept_by_others(kind, frame)
        kept, taken = self.watch_calls.set_aside()
        surroundings = surroundings_of(
            joint, here, self.followed.parameters, self.followed.optimizers, self.options.reserve,
            retained_bytes=self._kept_bytes() + kept + others,
            accumulates=self.accumulates, clips=self.clips,
            beside=self._other_batches(joint, [examples[i] for i in given], examples), ends_in_loss=ends_in_loss,
            trained=self.followed.trained, between_bytes=taken,
        )  # fmt: skip
        # Plan it beside the others.
        problem = GraphProblem(
            kind, frame, joint, inputs, surroundings, self.options, account, capture, make, aside_bytes=kept
        )
        captured, planned = self._plans.make(problem, [examples[i] for i in given])
        planned.given, planned.ends_in_loss = tuple(given), ends_in_loss
        planned.made_into_loss = self.losses.made_into(joint, frame)
        self._plans.keep(planned, problem, here, {id(p) for p in self.followed.parameters})
        self._tell_of_other_sessions(where)
        return captured, planned

    def captured_again(self, planned: Planned, joint: JointGraph) -> Iterable[Captured]:
        """Return the captures that `planned` was chosen from, for another trace of the same part."""
        problem = replace(self._plans.calls.problems[planned.kind], joint=joint)
        captures: Iterable[Captured] = problem.captured(planned.room, planned.plan.budget_bytes)
        return captures

    def see(self, planned: Planned, args: Sequence[Any] = (), call: weakref.ref[Node] | None = None) -> None:
        """Note other bytes on the device when a planned graph runs: pending calls, and what PyTorch reserved.

        It is called before forward, with `args`, and before backward, with its `call`.
        """
        self._reserved.look(lambda: self.reserved_bytes, self._where)
        self._plans.see(planned, args, call)

    def _tell_of_other_sessions(self, where: torch.device) -> None:
        """Warn if the plans of several sessions together exceed the device."""
        others = sum(s.peak_bytes for s in _SESSIONS if s is not self and s.followed.parameters)
        if others and self.peak_bytes + others > (whole := usable_bytes(where)):
            warnings.warn(
                f"what several sessions plan adds up to {format_bytes(self.peak_bytes + others)}, more than the "
                f"{format_bytes(whole)} of the device; give the models of one job one overspill.Session(budget=...)",
                stacklevel=2,
            )

    def engine_for(self, plan: Plan, device: torch.device) -> int:
        """Return the number of the transfer engine, with store space for the bytes that `plan` offloads."""
        if device.type == "cpu":
            suit_heap(plan.unmanaged_peak_bytes)
        plan.check_host()
        needed, kinds = store_bytes(plan), {p.device.type for p in self.followed.parameters}
        if not needed and kinds and device.type not in kinds:  # of the host's numbers, beside a model on a GPU
            return 0
        engine, number = self._engine_on(device)
        if self.loop.from_host_to is not None:
            needed -= held_bytes(plan)
        with disable_current_modes():  # AOTAutograd calls us in its fake mode; the store is real
            engine.store.reserve(needed, plan.tiers)
        return number

    def _engine_on(self, device: torch.device) -> tuple[TransferEngine, int]:
        if device.type not in self._engines:
            asked = self.options
            self._engines[device.type] = open_engine(
                asked.store, device, asked.store_dir, asked.host_bytes, checksum=asked.checksum
            )
            weakref.finalize(self, _dropped, self._engines[device.type][0], self.loop).atexit = False
        return self._engines[device.type]

    def begin_on_host(self, where: torch.device | None) -> None:
        """Run models that are in host memory on the device `where`, by plans that bring their weights; None: as before.

        Raises UnsupportedError where no plan moves weights.
        """
        if where is None:
            return
        if not self.loop.may_move:
            raise UnsupportedError(
                f"device={str(where)!r} of a model on the CPU: its weights come by plans of {MOVES_PARAMETERS!r}, "
                'without placement="planned"; leave these as they are, or use train_step'
            )
        self.loop.from_host_to = where

    def _other_batches(self, joint: JointGraph, given: Sequence[Any], examples: Sequence[Any]) -> list[int]:
        """Return the bytes of each batch on the device outside the graph; none if the loss is inside.

        `given` are the inputs of the graph.
        """
        outputs = outputs_of(joint)
        if not joint.tangents or not outputs or self.options.reserve is not None:
            return []
        other_batches = self._plans.calls.other_batches
        if not len(self.pending):
            other_batches.look([e for e in given if isinstance(e, Tensor)], outputs)
        return other_batches.sizes(besides=[e for e in examples if isinstance(e, Tensor)])

    def part(self, examples: Sequence[Any]) -> Part:
        """Return the part of the job that a graph on these `examples` is."""
        return self._calling, *(id(e) for e in examples if isinstance(e, nn.Parameter))


def _dropped(engine: TransferEngine, loop: LoopPlans) -> None:
    """Bring back what a session had in the store of `engine`, for whoever still has it, and close that."""
    loop.dropped(engine)
    engine.close_dropped()


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for session in list(_SESSIONS):
            if session._parked and session.followed.updated_by(optimizer):
                session.unpark()
            if session.plans and session.loop.is_left_out(optimizer):
                session.renewal.is_asked = True
                session.renewal.begin_rounds()
        check_step(optimizer, {s.watch_calls: (s.followed, s._plans.planned) for s in list(_SESSIONS)})


register_optimizer_step_pre_hook(_before_step)
