"""The backend behind `torch.compile(backend="overspill")`, and a check for skipped models.

If Dynamo skips a whole model, no code of Overspill runs. So before an optimizer steps, each model compiled with this
backend that has gradients must also have a plan. PyTorch imports this file when a user names the backend, and the
import registers that check.
"""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from overspill.core.errors import UnplannedError
from overspill.pytorch.dynamo import OptimizedModule, TorchCompileWrapper, innermost_backend
from overspill.pytorch.modules import COMPILED_CALL, ORIGINAL

from .backend import _SESSIONS, overspill_backend, was_asked_for_plans
from .session import Session

__all__ = ["overspill_backend", "session_with"]

_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that have stepped since
_waiting: weakref.WeakKeyDictionary[nn.Module, dict[str, Any] | None] = weakref.WeakKeyDictionary()
"""Models compiled with this backend that have no plan yet, with their options."""
_planned: weakref.WeakKeyDictionary[type, list[dict[str, Any] | None]] = weakref.WeakKeyDictionary()
"""Classes of models that had a plan, with the options of each such model."""


def session_with(options: Mapping[str, Any]) -> Session | None:
    """Return the session of the torch.compile calls that have this very `options` object; None before the first one."""
    known = _SESSIONS.get(id(options))
    return None if known is None else known[1]()


def look_for_plans(optimizer: Optimizer, *_: Any) -> None:
    """Raise UnplannedError, or warn, if `optimizer` updates a model without a plan.

    Only models compiled with this backend are checked.
    """
    if torch.compiler.is_compiling():
        return
    if optimizer not in _known:
        _known.add(optimizer)
        _waiting.update(_compiled_models())
    if not _waiting:
        return
    # Each waiting model has a plan by now, or is about to be updated without one.
    updated = {id(p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    for model, options in list(_waiting.items()):
        if was_asked_for_plans(options):
            del _waiting[model]
            _note_planned(model, options)
        elif any(id(p) in updated for p in model.parameters()):
            del _waiting[model]
            if not _runs_as_another(model, options):
                _tell(model, options or {})


def _note_planned(model: nn.Module, options: dict[str, Any] | None) -> None:
    known = _planned.setdefault(type(_inside(model)), [])
    if options not in known:
        known.append(options)


def _runs_as_another(model: nn.Module, options: dict[str, Any] | None) -> bool:
    """Return whether Dynamo runs `model` by the compiled graphs of another model.

    That is one of its class with equal options, which may be gone.
    """
    for other, asked in _compiled_models():
        if was_asked_for_plans(asked):
            _note_planned(other, asked)
    return options in _planned.get(type(_inside(model)), ())


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


def _compiled_models() -> Iterator[tuple[nn.Module, dict[str, Any] | None]]:
    """Yield live models compiled with this backend, with their options."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), nn.Module):
            continue
        if issubclass(type(thing), OptimizedModule):
            callbacks = [getattr(thing.dynamo_ctx, "callback", None)]
        else:  # module.compile(...)
            cells = getattr(thing.__dict__.get(COMPILED_CALL), "__closure__", None) or ()
            callbacks = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
        for callback in callbacks:
            backend = innermost_backend(callback) if callable(callback) else None
            if isinstance(backend, TorchCompileWrapper) and backend.compiler_fn is overspill_backend:
                yield thing, backend.kwargs.get("options")


register_optimizer_step_pre_hook(look_for_plans)
