"""Compile one graph of Dynamo: through AOTAutograd, by the session's plan, to lowered graphs that run."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import fx, nn

from overspill.capture.compiled.backward import check_saved_hooks
from overspill.capture.compiled.cut_step import CapturedCutStep
from overspill.capture.compiled.graph import Captured, InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph, copied, device_of, storages
from overspill.capture.compiled.kernels import eager_kernels
from overspill.capture.compiled.pieces import in_pieces
from overspill.capture.compiled.trace import captures, describe_inputs, leaves_told
from overspill.capture.programs.functions import compile_functions
from overspill.core import Graph, Verb
from overspill.core.errors import InfeasibleBudgetError, UnsupportedError
from overspill.core.units import format_bytes, format_seconds
from overspill.planning.carried_over import carried_over
from overspill.plans.plan import NO_LIMIT_BYTES, Plan
from overspill.pytorch.aot import aot_autograd, boxed
from overspill.pytorch.autograd import keeps_graph
from overspill.pytorch.dispatch import DisableAutocast, disable_current_modes
from overspill.pytorch.dynamo import install_guard, same_object
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.graphs import SOURCE
from overspill.pytorch.trees import tree_leaves
from overspill.runtime.arena import Arena
from overspill.runtime.driver import LoweredProgram
from overspill.runtime.lower import Stretch, lower, shown
from overspill.runtime.profile import OpTimer
from overspill.runtime.recording.instrument import run as run_program
from overspill.runtime.step.updates import update_together

from .calls import LEAVE_OUT, WRITES_OVER, Lowered
from .concurrent_plans import GraphProblem
from .cut_calls import CutCalls
from .double_backward import compiled_node, refuse_double_backward
from .loop_plans import persistent
from .loop_state import bring_for
from .partitions import Partitioned
from .pending_calls import GraphFrame
from .planned import Planned
from .session import Session
from .sharded import ShardedModel, gradients_of
from .tangents import (
    JointGradients,
    Layout,
    begin_backward,
    fake_examples,
    laid_out,
    takes_what_is_saved,
    without_absent,
    without_outputs_of_loss,
)
from .traced_away import wrappers_shown

Compiled = Callable[..., Any]
T = TypeVar("T")
_LOG = logging.getLogger("overspill")


class _TracedGraph(Exception):
    """Ends an AOTAutograd trace once the joint graph is known."""


class GraphCompiler:
    """Compiles one Dynamo graph: plans it when AOTAutograd partitions, and lowers it."""

    def __init__(
        self, module: fx.GraphModule, examples: Sequence[Any], session: Callable[[], Session], frame: GraphFrame
    ) -> None:
        self.module = module
        self.examples = list(examples)
        self.parameters = persistent(examples)
        self._session = session
        self.where = device_of(module.graph)
        self.inputs = describe_inputs(module, examples)
        self.frame = frame
        self.planned: Planned | None = None
        self.has_arena = False
        self.changed: frozenset[int] = frozenset()
        """Positions of the inputs that forward changes in place."""
        self.gradients: JointGradients | None = None
        self.timer: OpTimer | None = None
        self.shards: dict[str, int] = {}
        """Positions among the primals of parameters that are sharded, by name."""
        self.sharded_gradients: dict[int, str] = {}
        """Their names, by position among the gradients."""
        self.calls: CutCalls | None = None
        """Forward and backward of a step that is cut where the user's code runs."""
        self.fakes: list[Any] = []
        self.autocast: AbstractContextManager[Any] = nullcontext()

    @property
    def session(self) -> Session:
        """The session of the model being called."""
        return self._session()

    def watched(self, compiled: Compiled) -> Compiled:
        """Return `compiled`, wrapped so that the session notices each forward and backward.

        A second derivative of its backward is refused.
        """
        session_now, planned, has_arena, gradients = self._session, self.planned, self.has_arena, self.gradients
        changed, broken = self.changed, self.frame.broken
        if planned is None:  # no ops
            return compiled

        def begin(session: Session, call: Any) -> None:
            session.watch_calls.backwards_run += 1
            session.see(planned, call=call)
            session.arenas.give_back()  # of calls whose backward is over

        def run(*args: Any) -> Any:
            session = session_now()
            check_saved_hooks()  # also without gradients: a hook that is compiled itself runs so
            session.see(planned, args)
            if session.loop.state is not None:
                session.loop.state.notice_saved()
            if not has_arena:
                session.arenas.give_back()
            with wrappers_shown(args), session.graph_runs(args, changed, broken=broken) as seen:
                outputs = compiled(*args)
                seen.append(outputs)
            # Register what must happen when autograd reaches this call's backward.
            if torch.is_grad_enabled() and (node := compiled_node(outputs)) is not None:
                refuse_double_backward(node)
                if gradients is not None:
                    node.register_prehook(begin_backward)
                    node.set_materialize_grads(not gradients.can_differ)
                if planned.made_into_loss:
                    node.register_prehook(partial(session.losses.see_gradients, planned))
                # The node has the session now: a model may be dropped before its backward.
                session.pending.begin(node, planned.kind, partial(begin, session))
            return outputs

        return run

    def tell(self, seconds: float) -> None:
        """Log the kernels and the plan of the graph, and the seconds that planning took."""
        if self.planned is not None:
            plan, partitioned = self.planned.plan, self.planned.partition
            _LOG.info(
                "%s graph with %s kernels%s, planned and compiled in %s: peak %s of %s, unmanaged %s",
                "training" if self.planned.kind.inputs[0] else "evaluation",
                "eager's" if partitioned is None else "Inductor's",
                "" if partitioned in (None, 1.0) else f" (activation_memory_budget={partitioned:g})",
                format_seconds(seconds),
                *map(format_bytes, (plan.peak_bytes, plan.budget_bytes, plan.unmanaged_peak_bytes)),
            )

    def compile(self) -> Compiled:
        if self.session.options.backend == "inductor":
            if self.session.options.on_unplanned != "warn":
                return self._by_inductor()
            unchanged = copied(self.module)
            try:
                return self._by_inductor()
            except UnsupportedError as error:
                warnings.warn(f"{error}; it runs on the eager backend now, within its budget", stacklevel=2)
                self.module = unchanged
        # Backward may run twice with retain_graph=True, so AOTAutograd must not give saved tensors away.
        self.fakes = fake_examples(self.examples) if torch.is_grad_enabled() else []
        self.autocast = _autocast(self.where)
        with functorch_config.patch(donated_buffer=False):
            return self._traced(self.examples, self.partition)

    def _traced(self, examples: Sequence[Any], partition: Callable[..., Any]) -> Compiled:
        with eager_kernels() as casts, leaves_told(self.module, examples, casts):
            return aot_autograd(
                fw_compiler=self._boxed,
                bw_compiler=self._backward,
                inference_compiler=self._infer,
                partition_fn=partition,
            )(self.module, examples)

    def _by_inductor(self) -> Compiled:
        from .inductor import compile_with_inductor  # noqa: PLC0415 - seconds to import, and rarely needed

        partition = self.session.options.partition
        return compile_with_inductor(self.module, self.examples, self._plan_programs, partition)

    def _plan_programs(self, joint: JointGraph, capture_by: Callable[..., Partitioned[Captured]]) -> Lowered:
        """Return the captured programs, lowered, for `compile_with_inductor`."""
        loop, parameters = self.session.loop, self.parameters  # the session keeps these, not `self`

        def captures(calls: JointGraph, inputs: Any, around: Any, *more: Any) -> Iterator[Captured]:
            return loop.captures(calls, inputs, parameters, around, *more)

        def how(*given: Any) -> Partitioned[Captured]:
            return capture_by(*given, captures)

        def make(problem: GraphProblem[Any], partitioned: Partitioned[Captured], budget_bytes: int) -> Plan:
            plan = partitioned.best_plan(lambda one: problem.search(one.graph, budget_bytes))
            compile_functions(partitioned.of(plan.graph).joint.module.graph)  # where that fails, no plan is kept
            return plan

        self.changed = _changed(joint)
        # Plan every partition that is worth it; `make` picks the fastest.
        about = joint, self.inputs, self.examples, self.frame, how, make
        partitioned, self.planned = self._if_only_loss(joint, partial(self.session.plan, *about))
        plan = self.planned.plan
        captured = partitioned.of(plan.graph)
        self.planned.partition = captured.partition
        stretches = self._lowered(captured, plan)
        runs = [self._boxed(stretch.module, None, number=number) for number, stretch in enumerate(stretches[:2])]
        return Lowered(captured, stretches, runs)

    def _prepared(self, plan: Plan) -> tuple[int, Arena]:
        """Return the number of an engine whose store fits `plan`, and the arena of the plan."""
        device = self.where
        arena = self.session.arenas.of(plan, device)
        self.has_arena = arena.take is not None
        return self.session.engine_for(plan, device), arena

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and backward graphs, lowered from the plan; this is the partitioner of AOTAutograd."""
        graph = JointGraph(joint, num_fwd_outputs)
        self.gradients = JointGradients(graph)

        def made() -> tuple[Captured, Plan]:
            ends = self.session.losses.is_only(graph, self.session.part(self.examples), self.frame)
            return self._plan(without_outputs_of_loss(graph) if ends else graph)

        captured, plan = self._if_only_loss(graph, made)
        self.sharded_gradients = gradients_of(self.shards, graph)
        forward, backward = shown(captured, self._lowered(captured, plan))
        # Measure op times if asked.
        if self.session.options.profile:
            self.timer = self.session.timer = OpTimer(captured.graph, self.where)
        return forward, backward

    def _lowered(self, captured: Captured, plan: Plan) -> tuple[Stretch, ...]:
        """Open the store and lower `plan`; return its stretches: forward, and backward if any, then the update."""
        engine, arena = self._prepared(plan)
        stretches = lower(captured, plan.schedule, engine, arena, together=update_together, tiers=plan.tiers)
        if isinstance(captured, CapturedCutStep):
            state = self.session.loop.state
            assert state is not None
            state.engine, state.engine_number = self.session.engine, engine
            state.pending = self.session.pending
            if not state.in_force:
                assert self.planned is not None
                self.session.move_all(self.planned)
            on_host = captured.updated_by(plan.schedule.targets(Verb.RUN_ON_HOST))
            self.calls = self._calls_of(captured, stretches, on_host)
            for node, example in zip(self.module.graph.find_nodes(op="placeholder"), self.examples, strict=True):
                if isinstance(example, nn.Parameter) and (source := getattr(node, SOURCE, None)) is not None:
                    install_guard(source.make_guard(same_object))  # one code may be of several layers
        self._again = partial(self._for_layout, engine, arena, stretches[0])
        return stretches

    def _calls_of(
        self, captured: CapturedCutStep, stretches: Sequence[Stretch], on_host: Sequence[int] = ()
    ) -> CutCalls:
        loop = self.session.loop
        assert loop.state is not None
        names, alone = loop.names(captured, self.parameters), loop.updates_on_host and len(stretches) > 2
        return CutCalls(captured, stretches, loop.state, *names, on_host, on_host_alone=alone)

    def _if_only_loss(self, joint: JointGraph, plan: Callable[[], T]) -> T:
        """Return the result of `plan`, tried a second time if the budget is infeasible.

        The second try assumes that a loss which `joint` returns is the only one. Raises InfeasibleBudgetError.
        """
        about, losses = (joint, self.session.part(self.examples), self.frame), self.session.losses
        known = losses.is_only(*about)
        try:
            return plan()
        except InfeasibleBudgetError as error:
            if known or not losses.take_for_only(*about):
                raise
            try:
                return plan()
            except InfeasibleBudgetError:
                raise error from None  # what it names would do whatever losses are made

    def _plan(self, graph: JointGraph) -> tuple[Captured, Plan]:
        """Return the session's plan of `graph` and the capture that it uses: whole, or in pieces of rows."""
        divided = cache(in_pieces) if self.session.options.in_pieces else None  # the session keeps these, not `self`
        loop, parameters, sharded = self.session.loop, self.parameters, self._sharded_in(graph)
        positions = self.shards

        def how(joint: JointGraph, inputs: list[InputInfo], around: Surroundings) -> Partitioned[Captured]:
            if sharded is not None:
                return Partitioned([sharded.captured(positions, joint, inputs, around)])
            plain = partial(captures, joint, inputs, around, divided)
            return Partitioned(loop.captures(joint, inputs, parameters, around, plain))

        def make(problem: GraphProblem[Any], captured: Partitioned[Captured], budget_bytes: int) -> Plan:
            def planned(nbytes: int) -> Plan:
                return captured.best_plan(lambda one: problem.search(one.graph, nbytes), problem.options.times)

            return planned(budget_bytes) if sharded is None else sharded.agreed(captured.graph, budget_bytes, planned)

        self.changed = _changed(graph)
        with nullcontext() if sharded is None else sharded.planning():
            found, self.planned = self.session.plan(graph, self.inputs, self.examples, self.frame, how, make)
        return found.of(self.planned.plan.graph), self.planned.plan

    def _sharded_in(self, graph: JointGraph) -> ShardedModel | None:
        """Return the sharded model if `graph` reads its parameters, and note where."""
        sharded = self.session.sharded
        self.shards = {} if sharded is None else sharded.positions(self.parameters, graph)
        return sharded if self.shards else None

    def _for_layout(self, engine: int, arena: Arena, fore: Stretch, layout: Layout) -> Compiled | None:
        """Return a backward for gradients with other strides, by the same plan.

        None if that plan does not fit the new trace.
        """
        found: list[JointGraph] = []

        def partition(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            without_absent(joint, {number for number, strides in enumerate(layout) if strides is None})
            found.append(JointGraph(joint, num_fwd_outputs))
            raise _TracedGraph

        # Trace again with gradients of these strides.
        with torch.enable_grad(), self.autocast, laid_out(layout), suppress(_TracedGraph):
            self._traced(self.fakes, partition)
        # Carry the plan over, if forward is still the same.
        assert self.planned is not None
        assert self.gradients is not None
        plan = self.planned.plan
        # Gradients that it was planned without take what they take: the session has said so, and plans anew.
        limit = NO_LIMIT_BYTES if self.gradients.are_more(layout) else plan.schedule.budget_bytes
        followed, places = replace(plan.schedule, budget_bytes=limit), arena
        for captured in self.session.captured_again(self.planned, found[0]):
            if isinstance(captured, CapturedCutStep) is (self.calls is None):
                continue
            if (schedule := carried_over(followed, plan.graph, captured.graph)) is None:
                continue
            if arena.take is not None and schedule.instructions != plan.schedule.instructions:
                # Forward's blocks lie where its own backward has room beside them: what is new lies outside.
                places = arena.of_forward(captured.graph, schedule)
            tiers = plan.tiers if schedule.instructions == plan.schedule.instructions else None
            again, back, *_ = lower(captured, schedule, engine, places, together=update_together, tiers=tiers)
            outputs = len(captured.joint.forward_outputs)
            if takes_what_is_saved(back.module, again.module, fore.module, outputs, (again.own, fore.own)):
                if not isinstance(captured, CapturedCutStep):
                    return self._boxed(back.module, None, captured.graph)
                count = fore.own - outputs + len(captured.joint.tangents)
                return self._runs(self._calls_of(captured, (again, replace(back, plain=tuple(range(count))))), 1)
        return None

    def _infer(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        """Plan and lower a forward without backward (evaluation under no_grad)."""
        graph = JointGraph(module, len(tree_leaves(module.graph.find_nodes(op="output")[0].args)))
        captured, plan = self._plan(graph)
        (module,) = shown(captured, self._lowered(captured, plan))
        return self._boxed(module, _inputs)

    def _backward(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        compiled, gradients = self._boxed(module, _inputs, number=1), self.gradients
        assert gradients is not None  # there is no backward without a partition
        backwards: dict[Layout | None, Compiled | None] = {None: compiled}
        has_arena, sharded, names = self.has_arena, self.session.sharded, self.sharded_gradients

        def run(args: list[Any]) -> Any:
            if has_arena and keeps_graph():
                raise UnsupportedError(WRITES_OVER.format(LEAVE_OUT))
            given, layout = gradients.given()
            # Unusual strides, or gradients that are None, get a backward of their own.
            if layout is not None and layout not in backwards:
                with disable_current_modes():  # the caller's would see fake tensors as if they were real
                    backwards[layout] = self._again(layout)
            if layout is not None and backwards[layout] is not None:
                first = len(args) - len(layout)
                for number in list(given):
                    args[first + number] = given.pop(number)
            elif gradients.can_differ:
                gradients.fill(args, given)
            given.clear()
            made = gradients.of((backwards[layout] or compiled)(args))
            return made if sharded is None else sharded.take(made, names)

        return boxed(run)

    def _boxed(self, module: fx.GraphModule, _inputs: Any, of: Graph | None = None, *, number: int = 0) -> Compiled:
        """Return `module` as a callable that empties its list of arguments.

        Otherwise the caller's frame would keep them all alive.
        """
        if self.calls is not None:
            return self._runs(self.calls, number)
        program = LoweredProgram(module)
        if self.timer is not None and of is None:
            self.timer.instrument(program)
        assert self.planned is not None  # the partition, or the inference, has been asked for
        graph, shards = self.planned.plan.graph if of is None else of, self.shards
        agreed = 0 if self.session.sharded is None else self.session.sharded.number

        trains = of is None and self.planned.kind.inputs[0]

        def run(session: Session, args: list[Any]) -> Any:
            state = session.loop.state
            if trains and state is not None and state.in_force:
                if number:
                    state.has_gone_back()
                else:
                    state.hold(args)
            if session.sharded is not None and not number and shards:
                session.sharded.begin_run(agreed)
                session.sharded.give(shards, args)
            bring_for(args)
            return run_program(program, graph, session.begin_graph(), args)

        return self._watched_run(run)

    def _runs(self, calls: CutCalls, number: int) -> Compiled:
        """Return forward or backward, by `number`, of a step that is cut."""
        if self.timer is not None and calls is self.calls:
            self.timer.instrument(calls.programs[number])
        how = calls.backward if number else calls.forward
        return self._watched_run(lambda session, args: how(args, session.begin_graph()))

    def _watched_run(self, how: Callable[[Session, list[Any]], Any]) -> Compiled:
        session_now = self._session

        def run(args: list[Any]) -> Any:
            session = session_now()
            tracker = session.tracker
            if tracker is not None:
                tracker.add(args)
            # What autocast casts, it has cast in the graph.
            with DisableAutocast(), tracker or nullcontext():
                return how(session, args)

        return boxed(run)


def _changed(joint: JointGraph) -> frozenset[int]:
    """Return the positions of the inputs that `joint` changes in place.

    AOTAutograd merges inputs that overlap into one.
    """
    found = set()
    for node in joint.primals:
        if not joint.mutated_storages.isdisjoint(storages(node)):
            desc = node.meta["desc"]
            while not hasattr(desc, "idx"):
                desc = desc.base_of if hasattr(desc, "base_of") else desc.base
            found.add(desc.idx)
    return frozenset(found)


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context manager that restores the present autocast state."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    )
