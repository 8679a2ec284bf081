"""The backend behind `torch.compile(backend="overspill")`, what precedes its calls, and a check for skipped models.

Before each call, Dynamo asks for its callback. There the session learns of the call, as in `overspill.compile`.

If Dynamo skips a whole model, no code of Overspill compiles it. So before an optimizer steps, each model compiled with
this backend that has gradients must also have a plan. PyTorch imports this file when a user names the backend, and the
import registers both.
"""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overspill.core.errors import OverspillError, UnplannedError, UnsupportedError
from overspill.pytorch.dynamo import (
    CALLBACK,
    OptimizedModule,
    TorchCompileWrapper,
    hooks_of,
    innermost_backend,
    reset_dynamo,
)
from overspill.pytorch.modules import COMPILED_CALL, ORIGINAL
from overspill.runtime.sharding import sharded_modules

from .backend import _SESSIONS, overspill_backend, session_of
from .dynamo_gaps import Refused
from .graph_compiler import Compiled
from .loop_plans import guards_without
from .session import Session
from .traced_away import trace_what_is_away

__all__ = ["overspill_backend", "session_with"]
GuardFilter = Callable[[Sequence[Any]], Sequence[bool]]

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have stepped since
_waiting: weakref.WeakKeyDictionary[nn.Module, TorchCompileWrapper] = weakref.WeakKeyDictionary()
"""Models compiled with this backend that have no plan yet, with what compiles them."""


def session_with(options: Mapping[str, Any]) -> Session | None:
    """Return the session of the torch.compile calls that have this very `options` object; None before the first one."""
    known = _SESSIONS.get(id(options))
    return None if known is None else known[1]()


class _OneCall:
    """The backend of one torch.compile call, and the filter of its guards. A copy is that of another call.

    Dynamo runs a model by the graphs of another one whose backend is equal. This one equals no other, for graphs have
    the parameters that they move.
    """

    def __init__(self, options: Mapping[str, Any], users_filter: GuardFilter | None) -> None:
        self.options = options
        self.has_graphs = False
        self.refused: OverspillError | None = None
        """The error before a call, which is raised where Dynamo compiles the call."""
        self.session: Session | None = None
        """The session until a graph that is compiled holds it."""
        self.known: Callable[[], Session | None] = lambda: None
        """The session that has the models, by a weak reference."""
        self._users_filter = users_filter
        self._compile = overspill_backend  # a reference that `_ModelSearch` counts

    def __call__(self, module: fx.GraphModule, examples: Sequence[Any], **asked: Any) -> Compiled:
        self.has_graphs = True
        if (error := self.refused) is not None:
            self.refused = None
            raise Refused(error) from None
        compiled = self._compile(module, examples, **asked)
        self.session = None
        return compiled

    def wanted_guards(self, entries: Sequence[Any]) -> Sequence[bool]:
        """Return for each guard whether Dynamo keeps it."""
        session = session_with(self.options)
        ours = [True] * len(entries) if session is None else guards_without(session.loop)(entries)
        theirs = ours if self._users_filter is None else self._users_filter(entries)
        return [one and other for one, other in zip(ours, theirs, strict=True)]

    def __reduce__(self) -> Any:
        return _OneCall, (self.options, self._users_filter)


def callback_for_call(plain: Callable[[Any], Any], callback: Any) -> Any:
    """Return Dynamo's `callback` for a call that begins; where that is of ours, the session learns of it."""
    if (backend := _ours(callback)) is not None:
        one = backend.compiler_fn
        if not isinstance(one, _OneCall):
            hooks = hooks_of(callback)
            one = backend.compiler_fn = _OneCall(backend.kwargs.setdefault("options", {}), hooks.guard_filter_fn)
            hooks.guard_filter_fn = one.wanted_guards
        try:
            _begin_call(backend, one)
        except OverspillError as error:  # here Dynamo could not leave as it entered
            one.refused = error
            reset_dynamo()
    return plain(callback)


def _begin_call(backend: TorchCompileWrapper, one: _OneCall) -> None:
    session = session_of(one.options, begins_calls=True)
    if session is not one.known():
        models = [model for model, other in _compiled_models() if other is backend]
        for model in models:
            if sharded_modules(model):
                raise UnsupportedError(
                    f"{type(_inside(model)).__name__} is sharded by fully_shard (FSDP2), whose hooks gather its "
                    "parameters outside of graphs of torch.compile(backend='overspill') and of their budget; use "
                    "model = overspill.compile(model, budget=...), or overspill.train_step"
                )
        one.known = weakref.ref(session)
        for model in models:
            session.loop.name(_inside(model))
            session.follow(model.parameters())
    session.notice_kept_gradients()
    session.begin_call(id(backend))
    trace_what_is_away()
    one.session = None if session.plans else session


def look_for_plans(optimizer: Optimizer, *_: Any) -> None:
    """Raise UnplannedError, or warn, if `optimizer` updates a model without a plan.

    Only models compiled with this backend are checked.
    """
    if torch.compiler.is_compiling():
        return
    if optimizer not in _known:
        _known.add(optimizer)
        _search.renew()
    if not _waiting:
        return
    # Each waiting model has a plan by now, or is about to be updated without one.
    updated = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for model, backend in list(_waiting.items()):
        if isinstance(backend.compiler_fn, _OneCall) and backend.compiler_fn.has_graphs:
            del _waiting[model]
        elif any(id(p) in updated for p in model.parameters()):
            _tell(model, backend.kwargs.get("options", {}))  # an error comes again at the next update
            del _waiting[model]


def _inside(model: nn.Module) -> Any:
    return getattr(model, ORIGINAL, model)


def _tell(model: nn.Module, options: dict[str, Any]) -> None:
    name = type(_inside(model)).__name__
    message = (
        f"{name} trains without a plan: torch.compile(backend='overspill') has handed over no graph of it; "
        "overspill.compile says why, and overspill.train_step plans what torch.compile skips"
    )
    if options.get("on_unplanned") != "warn":
        raise UnplannedError(message)
    warnings.warn(message, stacklevel=4)


def _ours(callback: Any) -> TorchCompileWrapper | None:
    backend = innermost_backend(callback) if callable(callback) else None
    if not isinstance(backend, TorchCompileWrapper):
        return None
    return backend if isinstance(backend.compiler_fn, _OneCall) or backend.compiler_fn is overspill_backend else None


def _compiled_models() -> Iterator[tuple[nn.Module, TorchCompileWrapper]]:
    """Yield live models compiled with this backend, and what compiles them."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module):
            continue
        if issubclass(type(thing), OptimizedModule):
            callbacks = [getattr(thing.dynamo_ctx, "callback", None)]
        else:  # module.compile(...)
            cells = getattr(thing.__dict__.get(COMPILED_CALL), "__closure__", None) or ()
            callbacks = [cell.cell_contents for cell in cells]
        for callback in callbacks:
            if (backend := _ours(callback)) is not None:
                yield thing, backend


class _ModelSearch:
    """The search for compiled models among all objects, repeated only if there may be another one.

    Each compiled model, also a copy, has a wrapper of torch.compile. This has a reference to the backend's function, by
    itself or by its `_OneCall`.
    """

    def __init__(self) -> None:
        self._wrappers: list[weakref.ref[Any]] = []
        self._other_references = 0

    def renew(self) -> None:
        """Let models that are new since the last search wait for their plan."""
        references = sys.getrefcount(overspill_backend)
        if references == self._other_references + self._alive():
            return
        self._wrappers = [weakref.ref(thing) for thing in gc.get_objects() if _is_wrapper(thing)]
        self._other_references = references - self._alive()
        _waiting.update(_compiled_models())

    def _alive(self) -> int:
        return sum(wrapper() is not None for wrapper in self._wrappers)


def _is_wrapper(thing: Any) -> bool:
    return type(thing) is TorchCompileWrapper and _ours(thing) is not None


_search = _ModelSearch()
register_optimizer_step_pre_hook(look_for_plans)
setattr(*CALLBACK, partial(callback_for_call, CALLBACK.now))
