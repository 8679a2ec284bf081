"""The torch.compile backend that Dynamo calls with each graph, and the session that a graph belongs to."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.compiled.known_values import nested
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.core.progress import shown_in_terminal
from overspill.pytorch.dynamo import CompileContext, compute_overlapping_tensors
from overspill.pytorch.fake_tensors import DataDependentOutputException
from overspill.pytorch.storages import storage_key
from overspill.runtime.batches import kind
from overspill.runtime.ddp import refuse_split
from overspill.runtime.options import Options
from overspill.runtime.step.away import Away

from .dynamo_gaps import Refused, looked_at
from .graph_compiler import Compiled, GraphCompiler
from .input_views import returned_as_views, with_aliases
from .pending_calls import GraphFrame
from .plan_check import MOST_PLANS, too_many_kinds
from .session import Session

_OTHER_MEMORY = "set_ on a graph input"
"""AOTAutograd's words where forward gives one of its inputs other memory."""


def compile_graph(module: fx.GraphModule, examples: Sequence[Any], session: Callable[[], Session]) -> Compiled:
    """Return a callable that runs Dynamo's `module` by the session's plan.

    Dynamo keeps compiled graphs until it is reset, even when the model is gone. So `session` is a function that returns
    the session while the model is called or a backward is pending. An OverspillError reaches the caller of the model as
    itself, not wrapped by Dynamo.
    """
    if any(isinstance(example, Tensor) and example.is_nested for example in examples):
        raise Refused(nested("the model gets a nested tensor")) from None
    runs = _PerKind(module, session, [i for i, example in enumerate(examples) if _is_symbolic(example)])
    try:
        looked_at(module)
        if runs.unknown:
            return runs
        compiled = runs.compiled_for(examples)
    except OverspillError as error:
        raise Refused(error) from None
    found = runs if runs.changed else compiled
    views = list(returned_as_views(module, examples)) if runs.frame.broken and not runs.changed else []
    return (lambda *args: found(*with_aliases(args, views))) if views else found


class _PerKind:
    """Runs a graph by one plan for each kind of its inputs, made at the first call with that kind.

    A byte budget needs the sizes that Dynamo left open (`dynamic`), at the positions `unknown`; each call has them as
    numbers. Inputs that forward changes in place are traced by AOTAutograd with their present overlaps. Dynamo has no
    guard for these (pytorch #139789).
    """

    def __init__(self, module: fx.GraphModule, session: Callable[[], Session], unknown: Sequence[int]) -> None:
        self.module = module
        self.session = session
        self.unknown = unknown
        self.changed: frozenset[int] = frozenset()
        self.frame = _frame(module)
        self._compiled: dict[Any, Compiled] = {}

    def __call__(self, *args: Any) -> Any:
        return self.compiled_for(args)(*args)

    def compiled_for(self, args: Sequence[Any]) -> Compiled:
        """Return the graph compiled for inputs of this kind."""
        if (known := self._compiled.get(self._key(args))) is not None:
            return known
        if len(self._compiled) == MOST_PLANS:
            raise too_many_kinds()
        compiler = GraphCompiler(self.module, args, self.session, self.frame)
        begun = time.perf_counter()
        try:
            with shown_in_terminal("planning a graph"):
                compiled = compiler.watched(compiler.compile())
        except DataDependentOutputException as error:
            raise UnsupportedError(
                f"Dynamo left a number of the model open ({error}), and no plan can be made without it; "
                "pass dynamic=False to torch.compile, or use overspill.compile"
            ) from None
        except AssertionError as error:
            if _OTHER_MEMORY not in str(error):
                raise
            raise UnsupportedError(
                "forward gives a weight other memory (weight.data = …), and plans are for the one it has; do it before "
                f"the call, or call the model without a plan{_of_linear4bit()}"
            ) from None
        finally:
            compiler.examples.clear()  # what is compiled keeps the compiler, which would keep the first batch
        compiler.tell(time.perf_counter() - begun)
        self.changed |= compiler.changed
        self._compiled[self._key(args)] = compiled
        return compiled

    def _key(self, args: Sequence[Any]) -> Any:
        """Return the kinds of unknown inputs, and the overlaps of inputs that are changed."""
        sharing: dict[int, list[int]] = {}
        for position, value in enumerate(args if self.changed else ()):
            if isinstance(value, Tensor) and not isinstance(value, Away):  # which overlaps none, and stays away
                sharing.setdefault(storage_key(value), []).append(position)
        overlaps = []
        for positions in sharing.values():
            if len(positions) > 1 and not self.changed.isdisjoint(positions):
                found = compute_overlapping_tensors([args[i] for i in positions], symbolic=False)
                overlaps += [(positions[i], args[positions[i]].storage_offset()) for i in sorted(found)]
        return tuple(kind(args[i]) for i in self.unknown), tuple(overlaps)


def _of_linear4bit() -> str:
    """Return how to keep bitsandbytes from doing so, if it is there: its Linear4bit does (0.50.2, nn/modules.py)."""
    if "bitsandbytes" not in sys.modules:
        return ""
    return (
        ". bitsandbytes packs weights of 4 bits anew where they are evaluated on a CPU; "
        "layer.support_avx512bf16_for_cpu = False, for each Linear4bit, keeps them as they are"
    )


def _is_symbolic(example: Any) -> bool:
    """Return whether Dynamo left this number, or a size of this tensor, symbolic."""
    if isinstance(example, Tensor):
        return any(isinstance(n, torch.SymInt) for n in (*example.shape, *example.stride()))
    return isinstance(example, (torch.SymInt, torch.SymFloat))


def overspill_backend(
    module: fx.GraphModule,
    examples: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile a graph for `torch.compile(model, backend="overspill", options={"budget": "8GiB", …})`.

    All graphs of one `torch.compile` call share one budget. Options are those of `overspill.compile`.
    """
    try:
        if mode is not None:
            raise RequestError("the overspill backend has no modes; pass options={...}")
        refuse_split(module)
        session = session_of({} if options is None else options, begins_calls=False)
    except OverspillError as error:
        raise Refused(error) from None
    return compile_graph(module, examples, lambda: session)  # the only strong reference


_SESSIONS: dict[int, tuple[Mapping[str, Any], weakref.ref[Session]]] = {}
"""Sessions by the id of their torch.compile call's options object, which Dynamo keeps until it is reset."""


def session_of(options: Mapping[str, Any], *, begins_calls: bool) -> Session:
    """Return the session of one torch.compile call.

    Dynamo passes the same options object for each graph of the call. Where nobody begins calls, parameters stay.
    """
    key = id(options)
    if key in _SESSIONS and (known := _SESSIONS[key][1]()) is not None:
        return known
    names = {field.name for field in fields(Options) if field.init}
    if unknown := set(options) - names:
        raise RequestError(f"unknown option {min(unknown)!r}; options: {', '.join(sorted(names))}")
    session = Session(Options(**options))
    if not begins_calls:
        session.loop.may_move = False
        session.loop.why_not = "this way of torch.compile cannot move them, overspill.compile can"
    _SESSIONS[key] = options, weakref.ref(session, lambda ref: _forget(key, ref))
    return session


def _forget(key: int, session: weakref.ref[Session]) -> None:
    if _SESSIONS[key][1] is session:
        del _SESSIONS[key]


def backend_of(session: Session) -> Callable[[fx.GraphModule, Sequence[Any]], Compiled]:
    """Return a torch.compile backend for `session`, held by a weak reference.

    Dynamo keeps all backends that it has seen.
    """
    return _Backend(session)


class _Backend:
    """A torch.compile backend bound to one session.

    A copy of it is the same object. When unpickled, it is the backend of a new session: Lightning stores in a model how
    it was compiled.
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


def _frame(module: fx.GraphModule) -> GraphFrame:
    compile_id = CompileContext.current_compile_id()
    reason = getattr(module, "compile_subgraph_reason", None)
    number = getattr(compile_id, "frame_id", None)
    return GraphFrame(number if number is not None else id(module), bool(reason is not None and reason.graph_break))
