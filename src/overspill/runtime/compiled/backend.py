"""The torch.compile backend: from Dynamo's graph through AOTAutograd to lowered graphs that run.

Names private to PyTorch that this file relies on (2.11 to 2.14): `_BoxedCodeGen`, `aot_autograd`'s `partition_fn`,
`CustomPartitionerFn`, `gm.compile_subgraph_reason`, the compile id, `torch._C._DisableAutocast`, and
`BackendCompilerFailed`'s `remove_dynamo_frames`, whose result Dynamo raises.
"""

from __future__ import annotations

import logging
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
import torch._functorch.config
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import BackendCompilerFailed
from torch._guards import CompileContext
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._pytree import tree_leaves

from overspill.capture.compiled.graph import Captured, capture
from overspill.capture.compiled.joint import JointGraph, copied, device_of
from overspill.capture.compiled.kernels import eager_kernels
from overspill.capture.compiled.known_values import nested
from overspill.capture.compiled.pieces import in_pieces
from overspill.capture.compiled.trace import describe_inputs, leaves_told
from overspill.core import Device, Graph
from overspill.core.errors import InfeasibleBudget, OverspillError, RequestError, UnsupportedError
from overspill.core.units import format_bytes, format_seconds
from overspill.planning.carried_over import carried_over
from overspill.plans.plan import NO_LIMIT_BYTES, Plan
from overspill.runtime.arena import Arena
from overspill.runtime.batches import kind
from overspill.runtime.driver import LoweredProgram
from overspill.runtime.lower import lower, lower_inference
from overspill.runtime.lower_groups import made_by
from overspill.runtime.options import Options
from overspill.runtime.parallel import refuse_split
from overspill.runtime.profile import OpTimer
from overspill.runtime.recording.recorder import RunRecorder
from overspill.runtime.recording.told import run as run_program

from .calls import LEAVE_OUT, WRITES_OVER, Lowered
from .double_backward import compiled_node, refuse_double_backward
from .in_force import MOST_PLANS, too_many_kinds
from .partitions import Partitioned
from .planned import GraphFrame, Planned
from .session import Session, plan_captured
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

Compiled = Callable[..., Any]
T = TypeVar("T")
_LOG = logging.getLogger("overspill")


class _Traced(Exception):
    """Ends an AOTAutograd trace once the joint graph is known."""


class _Refused(BackendCompilerFailed):
    """Carries an Overspill error through Dynamo, which then raises that error instead."""

    def __init__(self, error: OverspillError) -> None:
        super().__init__(compile_graph, error, None)

    def remove_dynamo_frames(self) -> Any:
        """The exception that Dynamo finally raises."""
        return self.inner_exception.with_traceback(None)


def compile_graph(module: fx.GraphModule, examples: Sequence[Any], session: Callable[[], Session]) -> Compiled:
    """A callable that runs Dynamo's `module` by the session's plan.

    With symbolic sizes, one plan is made for each kind of inputs.

    Dynamo keeps compiled graphs until it is reset, even when the model is gone. So `session` is a function that returns
    the session while the model is called or a backward is pending. An OverspillError reaches the caller of the model as
    itself, not wrapped by Dynamo.
    """
    if any(isinstance(example, Tensor) and example.is_nested for example in examples):
        raise _Refused(nested("the model gets a nested tensor")) from None
    unknown = [i for i, example in enumerate(examples) if _is_symbolic(example)]
    if unknown:
        return _PerShape(module, session, tuple(unknown))
    try:
        return _compile(module, examples, session, _frame(module))
    except OverspillError as error:
        raise _Refused(error) from None


def _compile(
    module: fx.GraphModule, examples: Sequence[Any], session: Callable[[], Session], frame: GraphFrame
) -> Compiled:
    compiler = _GraphCompiler(module, examples, session, frame)
    begun = time.perf_counter()
    try:
        compiled = compiler.watched(compiler.compile())
        compiler.tell(time.perf_counter() - begun)
        return compiled
    finally:
        compiler.examples.clear()  # what is compiled keeps the compiler, which would keep the first batch


class _PerShape:
    """Runs a graph with symbolic sizes (`dynamic`): one plan per input shape.

    No byte budget can be planned for unknown sizes. Each kind of inputs gets a graph and a plan when it is first seen:
    the sizes are numbers then.
    """

    def __init__(self, module: fx.GraphModule, session: Callable[[], Session], unknown: tuple[int, ...]) -> None:
        self.module = module
        self.session = session
        self.unknown = unknown
        self.frame = _frame(module)
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        key = tuple(kind(args[i]) for i in self.unknown)
        if key not in self._compiled:
            if len(self._compiled) == MOST_PLANS:
                raise too_many_kinds()
            try:
                self._compiled[key] = _compile(self.module, args, self.session, self.frame)
            except DataDependentOutputException as error:
                raise UnsupportedError(
                    f"Dynamo left a number of the model open ({error}), and no plan can be made without it; "
                    "pass dynamic=False to torch.compile, or use overspill.compile"
                ) from None
        return self._compiled[key](*args)


def _is_symbolic(example: Any) -> bool:
    """Whether Dynamo left this number, or a size of this tensor, symbolic."""
    if isinstance(example, Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*example.shape, *example.stride()))
    return isinstance(example, (torch.SymInt, torch.SymFloat))


class _GraphCompiler:
    """Compiles one Dynamo graph: plans it when AOTAutograd partitions, and lowers it."""

    def __init__(
        self, module: fx.GraphModule, examples: Sequence[Any], session: Callable[[], Session], frame: GraphFrame
    ) -> None:
        self.module = module
        self.examples = list(examples)
        self._session = session
        self.where = device_of(module.graph)
        self.inputs = describe_inputs(module, examples)
        self.frame = frame
        self.planned: Planned | None = None
        self.has_arena = False
        self.gradients: JointGradients | None = None
        self.timer: OpTimer | None = None
        self.fakes: list[Any] = []
        self.autocast: AbstractContextManager[Any] = nullcontext()

    @property
    def session(self) -> Session:
        """The session of the model being called."""
        return self._session()

    def watched(self, compiled: Compiled) -> Compiled:
        """`compiled`, wrapped so that the session sees each forward and backward.

        A second derivative of its backward is refused.
        """
        session_now, planned, has_arena, gradients = self._session, self.planned, self.has_arena, self.gradients
        if planned is None:  # no ops
            return compiled

        def begin(session: Session, call: Any) -> None:
            session.watch_calls.backwards_run += 1
            session.see(planned, call=call)
            session.arenas.give_back()  # of calls whose backward is over

        def run(*args: Any) -> Any:
            session = session_now()
            session.see(planned, args)
            if not has_arena:
                session.arenas.give_back()
            outputs = compiled(*args)
            # Register what must happen when autograd reaches this call's backward.
            if torch.is_grad_enabled() and (node := compiled_node(outputs)) is not None:
                refuse_double_backward(node)
                if gradients is not None:
                    node.register_prehook(begin_backward)
                    node.set_materialize_grads(not gradients.can_differ)
                if planned.made_into_loss:
                    node.register_prehook(partial(session.see_gradients, planned))
                # The node has the session now: a model may be dropped before its backward.
                session.pending.begin(node, planned.kind, partial(begin, session))
            return outputs

        return run

    def tell(self, seconds: float) -> None:
        """Log which kernels run by which plan, and the seconds it took."""
        if self.planned is not None:
            plan, parted = self.planned.plan, self.planned.partition
            _LOG.info(
                "%s graph with %s kernels%s, planned and compiled in %s: peak %s of %s, unmanaged %s",
                "training" if self.planned.kind.inputs[0] else "evaluation",
                "eager's" if parted is None else "Inductor's",
                "" if parted in (None, 1.0) else f" (activation_memory_budget={parted:g})",
                format_seconds(seconds),
                *map(format_bytes, (plan.peak_bytes, plan.budget_bytes, plan.unmanaged_peak_bytes)),
            )

    def compile(self) -> Compiled:
        # Users call backward outside the autocast region.
        with torch._functorch.config.patch({"backward_pass_autocast": "off"}):
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
            with torch._functorch.config.patch(donated_buffer=False):
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
        return compile_with_inductor(self.module, self.examples, self._plan_programs, self._running, partition)

    def _running(self) -> AbstractContextManager[RunRecorder | None]:
        return self.session.running()

    def _plan_programs(self, joint: JointGraph, how: Callable[..., Partitioned[Captured]]) -> Lowered:
        """The captured programs and their lowered graphs, for `compile_with_inductor`."""

        def make(options: Options, partitioned: Partitioned[Captured], device: Device, budget_bytes: int) -> Plan:
            return partitioned.best_plan(lambda captured: plan_captured(options, captured, device, budget_bytes))

        # Plan every partition that is worth it; `make` picks the fastest.
        about = joint, self.inputs, self.examples, self.frame, how, make
        partitioned, self.planned = self._if_only_loss(joint, partial(self.session.plan, *about))
        plan = self.planned.plan
        captured = partitioned.of(plan.graph)
        self.planned.partition = captured.partition
        return captured, self._lowered(captured, plan, *self._prepared(plan))

    def _prepared(self, plan: Plan) -> tuple[int, Arena]:
        """The number of an engine with room for `plan` in its store, and the plan's arena."""
        device = self.where
        arena = self.session.arenas.of(plan, device)
        self.has_arena = arena.take is not None
        return self.session.engine_for(plan, device), arena

    def partition(
        self, joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """AOTAutograd's partitioner: the forward and backward graphs, lowered from the plan."""
        graph = JointGraph(joint, num_fwd_outputs)
        self.gradients = JointGradients(graph)

        def made() -> tuple[Captured, Plan]:
            ends = self.session.ends_in_loss(graph, self.examples, self.frame)
            return self._plan(without_outputs_of_loss(graph) if ends else graph)

        captured, plan = self._if_only_loss(graph, made)
        # Open the store and lower the plan.
        engine, arena = self._prepared(plan)
        forward, backward = self._lowered(captured, plan, engine, arena)
        self._again = partial(self._for_layout, engine, arena, forward)
        # Measure op times if asked.
        if self.session.options.profile:
            self.timer = self.session.timer = OpTimer(captured.graph, self.where)
        return forward, backward

    def _if_only_loss(self, joint: JointGraph, plan: Callable[[], T]) -> T:
        """The result of `plan`; where that does not fit, of another try that takes a loss which `joint` returns for the only one.

        Raises InfeasibleBudget.
        """
        about = joint, self.examples, self.frame
        known = self.session.ends_in_loss(*about)
        try:
            return plan()
        except InfeasibleBudget as error:
            if known or not self.session.take_for_only_loss(*about):
                raise
            try:
                return plan()
            except InfeasibleBudget:
                raise error from None  # what it names would do whatever losses are made

    def _plan(self, graph: JointGraph) -> tuple[Captured, Plan]:
        """The session's plan of `graph`, and the capture that it is of: as it is, or in pieces of rows."""
        divided, may_divide = cache(in_pieces), self.session.options.in_pieces  # the session keeps these, not `self`

        def captures(joint: JointGraph, *around: Any) -> Iterator[Captured]:
            yield capture(joint, *around)
            if may_divide and (other := divided(joint)) is not None:
                yield capture(other, *around)

        def how(*given: Any) -> Partitioned[Captured]:
            return Partitioned(captures(*given))

        def make(options: Options, captured: Partitioned[Captured], device: Device, budget_bytes: int) -> Plan:
            return captured.best_plan(lambda one: plan_captured(options, one, device, budget_bytes), options.times)

        found, self.planned = self.session.plan(graph, self.inputs, self.examples, self.frame, how, make)
        return found.of(self.planned.plan.graph), self.planned.plan

    def _lowered(self, captured: Captured, plan: Plan, engine: int, arena: Arena) -> tuple[fx.GraphModule, ...]:
        """Forward and backward graphs of `plan`; forward alone in inference."""
        how = captured, plan.schedule, engine, made_by(captured, plan, self.session.steps), arena
        return lower(*how) if captured.joint.backward_outputs else (lower_inference(*how),)

    def _for_layout(self, engine: int, arena: Arena, forward: fx.GraphModule, layout: Layout) -> Compiled | None:
        """A backward for gradients with other strides, by the same plan.

        None where that plan does not fit the new trace.
        """
        found: list[JointGraph] = []

        def partition(joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, **_: Any) -> Any:
            without_absent(joint, {number for number, strides in enumerate(layout) if strides is None})
            found.append(JointGraph(joint, num_fwd_outputs))
            raise _Traced

        # Trace again with gradients of these strides.
        off = torch._functorch.config.patch({"backward_pass_autocast": "off"})
        with torch.enable_grad(), self.autocast, off, laid_out(layout), suppress(_Traced):
            self._traced(self.fakes, partition)
        # Carry the plan over, if forward is still the same.
        assert self.planned is not None
        assert self.gradients is not None
        plan = self.planned.plan
        # Gradients that it was planned without take what they take: the session has said so, and plans anew.
        limit = NO_LIMIT_BYTES if self.gradients.are_more(layout) else plan.schedule.budget_bytes
        followed, places = replace(plan.schedule, budget_bytes=limit), arena
        for captured in self.session.captured_again(self.planned, found[0]):
            if (schedule := carried_over(followed, plan.graph, captured.graph)) is None:
                continue
            if arena.take is not None and schedule.instructions != plan.schedule.instructions:
                # Forward's blocks lie where its own backward has room beside them: what is new lies outside.
                places = arena.of_forward(captured.graph, schedule)
            carried = replace(plan, graph=captured.graph, schedule=schedule)
            again, backward = self._lowered(captured, carried, engine, places)
            if takes_what_is_saved(backward, again, forward, len(found[0].forward_outputs)):
                return self._boxed(backward, None, captured.graph)
        return None

    def _infer(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        """Plan and lower a forward without backward (evaluation under no_grad)."""
        graph = JointGraph(module, len(tree_leaves(module.graph.find_nodes(op="output")[0].args)))
        captured, plan = self._plan(graph)
        (module,) = self._lowered(captured, plan, *self._prepared(plan))
        return self._boxed(module, _inputs)

    def _backward(self, module: fx.GraphModule, _inputs: Any) -> Compiled:
        compiled, gradients = self._boxed(module, _inputs), self.gradients
        assert gradients is not None  # there is no backward without a partition
        backwards: dict[Layout | None, Compiled | None] = {None: compiled}
        has_arena = self.has_arena

        def run(args: list[Any]) -> Any:
            if has_arena and torch._C._autograd._get_current_graph_task_keep_graph():
                raise UnsupportedError(WRITES_OVER.format(LEAVE_OUT))
            given, layout = gradients.given()
            # Unusual strides, or gradients that are None, get a backward of their own.
            if layout is not None and layout not in backwards:
                backwards[layout] = self._again(layout)
            if layout is not None and backwards[layout] is not None:
                first = len(args) - len(layout)
                for number in list(given):
                    args[first + number] = given.pop(number)
            elif gradients.can_differ:
                gradients.fill(args, given)
            given.clear()
            return gradients.of((backwards[layout] or compiled)(args))

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def _boxed(self, module: fx.GraphModule, _inputs: Any, of: Graph | None = None) -> Compiled:
        """`module` as a callable that empties its list of arguments.

        The caller's frame would keep them all alive otherwise.
        """
        program = LoweredProgram(module)
        if self.timer is not None and of is None:
            self.timer.instrument(program)
        session_now = self._session
        assert self.planned is not None  # the partition, or the inference, has been asked for
        graph = self.planned.plan.graph if of is None else of

        def run(args: list[Any]) -> Any:
            session = session_now()
            tracker = session.tracker
            if tracker is not None:
                tracker.add(args)
            # What autocast casts, it has cast in the graph.
            with session.running() as recorder, torch._C._DisableAutocast(), tracker or nullcontext():
                return run_program(program, graph, recorder, args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def overspill_backend(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """`torch.compile(model, backend="overspill", options={"budget": "8GiB", "policy": "auto", …})`.

    All graphs of one `torch.compile` call share one budget. Options are those of `overspill.compile`.
    """
    try:
        if mode is not None:
            raise RequestError("the overspill backend has no modes; pass options={...}")
        refuse_split(module)
        session = _session_of(options if options is not None else {})
    except OverspillError as error:
        raise _Refused(error) from None
    return compile_graph(module, examples, lambda: session)  # the only strong reference


def was_asked_for_plans(options: Mapping[str, Any] | None) -> bool:
    """Whether Dynamo has handed over a graph for these torch.compile options.

    Without options: a graph of any call that had none.
    """
    if options is None:
        return any(not asked for asked in _ASKED)
    return any(asked is options for asked in _ASKED)


_SESSIONS: dict[int, tuple[Mapping[str, Any], weakref.ref[Session]]] = {}
"""Sessions by the id of their torch.compile call's options object, which Dynamo keeps until it is reset."""
_ASKED: deque[Mapping[str, Any]] = deque(maxlen=1000)
"""Options of all calls that ever got a session, also of sessions that are gone."""


def _session_of(options: Mapping[str, Any]) -> Session:
    """The session of one torch.compile call.

    Dynamo passes the same options object for each graph of the call.
    """
    key = id(options)
    if key in _SESSIONS and (known := _SESSIONS[key][1]()) is not None:
        return known
    names = {field.name for field in fields(Options) if field.init}
    if unknown := set(options) - names:
        raise RequestError(f"unknown option {min(unknown)!r}; options: {', '.join(sorted(names))}")
    session = Session(Options(**options))
    _SESSIONS[key] = options, weakref.ref(session, lambda ref: _forget(key, ref))
    if not was_asked_for_plans(options):
        _ASKED.append(options)
    return session


def _forget(key: int, session: weakref.ref[Session]) -> None:
    if _SESSIONS[key][1] is session:
        del _SESSIONS[key]


def backend_of(session: Session) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """A torch.compile backend for `session`, held by a weak reference.

    Dynamo keeps all backends that it has seen.
    """
    return _Backend(session)


class _Backend:
    """A torch.compile backend bound to one session.

    Its copy is itself. Unpickled, it is the backend of a new session: Lightning stores in a model how it was compiled.
    """

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)
        self._options = session.options

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any]) -> Compiled:
        return compile_graph(module, examples, self._session_now)

    def __deepcopy__(self, memo: Any) -> _Backend:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _backend_with, ({f.name: getattr(self._options, f.name) for f in fields(Options) if f.init},)

    def _session_now(self) -> Session:
        session = self._session()
        assert session is not None  # the compiled model, which has called this, or the call's autograd node keeps it
        return session


def _backend_with(options: Mapping[str, Any]) -> Callable[..., Compiled]:
    return partial(overspill_backend, options=options)


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context manager that restores autocast as it is now."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind):
        return nullcontext()
    return torch.autocast(
        kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    )


def _frame(module: fx.GraphModule) -> GraphFrame:
    compile_id = CompileContext.current_compile_id()
    reason = getattr(module, "compile_subgraph_reason", None)
    number = getattr(compile_id, "frame_id", None)
    return GraphFrame(number if number is not None else id(module), bool(reason is not None and reason.graph_break))
