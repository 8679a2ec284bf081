"""Detect optimizer steps that follow from no plan; raise or warn.

A library may put its own forward over the compiled one, or call parts of the model. Then no code of Overspill runs. So
before an optimizer steps, each compiled model whose parameters it updates must have run a planned backward since that
optimizer's last step.

Known limits:

- The backwards of a session are counted together: if one of its models is planned, all count as planned.
- A second model that shares parameters and is not compiled may train them alone. So steps that also update parameters
  outside the session are no error, unless the compiled method was replaced and never ran.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .plan_check import WARN_INSTEAD, PlanCheck
from .planned import Planned
from .weak_references import WeakReferences

MOST_UNPLANNED = 1
"""Most steps in a row without a plan: one may only make an optimizer's state, as when a checkpoint is loaded."""
OF_SESSION = Mapping[PlanCheck, tuple[WeakReferences, Sequence[Planned]]]
"""The parameters and plans of each live session, by its check."""


@dataclass(frozen=True)
class _CompiledMethod:
    """A compiled method of a module, known even when the module no longer has it.

    It keeps neither the module nor the session alive.
    """

    check: PlanCheck
    """The check of its session."""
    name: str
    """The method's name."""
    call: weakref.ref[Any]
    """The compiled method."""
    original: weakref.ref[Any]
    """The function that it was compiled from."""

    def replacement(self, module: nn.Module) -> Any:
        """Return what the module has in place of the compiled method and of the original one, or None."""
        now = module.__dict__.get(self.name)
        return None if now is self.call() or _function(now) is self.original() else now


_METHODS: weakref.WeakKeyDictionary[nn.Module, dict[str, _CompiledMethod]] = weakref.WeakKeyDictionary()
"""The compiled methods of modules, by their names."""


def watch_method(call: Any, method: Any, check: PlanCheck) -> None:
    """Note that `call` is the compiled `method` of a module; other callables are not watched."""
    while not hasattr(method, "__func__") and hasattr(method, "__wrapped__"):
        method = method.__wrapped__  # compiled twice
    module = getattr(method, "__self__", None)
    if isinstance(module, nn.Module) and hasattr(method, "__func__"):
        known = _CompiledMethod(check, method.__name__, weakref.ref(call), weakref.ref(method.__func__))
        _METHODS.setdefault(module, {})[known.name] = known


def check_step(optimizer: Optimizer, sessions: OF_SESSION) -> None:
    """Raise UnplannedError, or warn once, if `optimizer` is about to update a compiled model without a plan.

    An error comes at the second such step in a row.
    """
    methods = list(_methods())
    checks = dict.fromkeys([*sessions, *(method.check for _, method in methods)])
    watched = [check for check in checks if check.checks_steps]
    # Most steps end here: each session has run a backward since.
    unplanned = {check: count for check in watched if (count := check.unplanned_steps(optimizer))}
    if not unplanned:
        return
    of_all = (p for group in optimizer.param_groups for p in group["params"])
    updated = {id(p): p.grad for p in of_all if p.grad is not None}
    for check, count in unplanned.items():
        own = updated.keys() & _parameters(check, sessions, methods)
        if not own:
            continue  # it steps on others, or has no gradients yet
        check.note_unplanned(optimizer, count)
        if count <= MOST_UNPLANNED or not _any_set(updated, own):
            continue
        # Gradients may be those of another model that shares the parameters, planned or not.
        if any(own & _read(other, sessions, methods) for other in watched if other not in unplanned):
            continue
        replaced = next(((module, method) for module, method in methods if _is_replaced(check, module, method)), None)
        if _any_set(updated, updated.keys() - own) and (replaced is None or check.backwards_run):
            continue
        check.tell(_message(*(replaced or (None, None))))


def shown(function: Any) -> str:
    """Return the module and the qualified name of a callable, as its own code has them.

    Its attributes may be those of another function, which it wraps.
    """
    inside = _function(function)
    if (code := getattr(inside, "__code__", None)) is not None:
        return f"{inside.__globals__['__name__']}.{code.co_qualname}"
    of = inside if isinstance(inside, type) else type(inside)
    return f"{of.__module__}.{of.__qualname__}"


def _methods() -> Iterator[tuple[nn.Module, _CompiledMethod]]:
    """Yield the compiled methods, but for those that the user took away without putting others in their place."""
    for module, methods in list(_METHODS.items()):
        for method in list(methods.values()):
            if method.call() is None and method.replacement(module) is None:
                del methods[method.name]
            else:
                yield module, method


def _is_replaced(check: PlanCheck, module: nn.Module, method: _CompiledMethod) -> bool:
    return method.check is check and method.replacement(module) is not None


def _parameters(
    check: PlanCheck, sessions: OF_SESSION, methods: Sequence[tuple[nn.Module, _CompiledMethod]]
) -> set[int]:
    """Return the identities of the parameters of the session's models."""
    followed = sessions[check][0].parameters if check in sessions else ()
    return {id(p) for p in followed} | {id(p) for m, method in methods if method.check is check for p in m.parameters()}


def _read(check: PlanCheck, sessions: OF_SESSION, methods: Sequence[tuple[nn.Module, _CompiledMethod]]) -> set[int]:
    """Return the identities of the parameters that the session's models have, or that its graphs read."""
    plans = sessions[check][1] if check in sessions else ()
    return _parameters(check, sessions, methods).union(*(planned.parameters for planned in plans))


def _function(method: Any) -> Any:
    """Return the function of a bound method or a partial, or the callable itself."""
    while (inside := getattr(method, "__func__", None) or getattr(method, "func", None)) is not None:
        method = inside
    return method


def _any_set(gradients: Mapping[int, Tensor], keys: set[int]) -> bool:
    """Return whether a gradient has an element that is not zero."""
    dense = (g.coalesce().values() if g.is_sparse else g for g in (gradients[key] for key in keys))
    return any(bool(values.count_nonzero()) for values in dense)


def _message(module: nn.Module | None, method: _CompiledMethod | None) -> str:
    if module is None or method is None:
        return (
            "the model is trained without a plan: two optimizer steps in a row follow from no call of it; where a part "
            "of it is called (compiled.model(...)), compile the function that does so: overspill.compile(loss_fn), or "
            f"overspill.train_step, {WARN_INSTEAD}"
        )
    return (
        f"{type(module).__name__} is trained without a plan: {shown(method.replacement(module))} replaced its compiled "
        f"{method.name}, and two optimizer steps in a row follow from no call of it; compile it after that, in Trainer "
        f"and TRL with callbacks=[overspill.callbacks.Budget(...)], {WARN_INSTEAD}"
    )
