"""What torch.compile sees of tensors that are away: all that it sees of those that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any

from torch import Tensor

from overspill.pytorch.dispatch import is_traceable_wrapper_subclass
from overspill.pytorch.dynamo import compilation
from overspill.pytorch.fake_tensors import FROM_TENSOR, FakeTensor, FakeTensorMode, fake_parameter
from overspill.pytorch.patching import patched
from overspill.runtime.step.away import GUARDS, Away, hide, show
from overspill.runtime.step.inner_tensors import parts_of, wrapped_again

from .loop_state import TensorGuard, WrapperGuard, states
from .sharded import Whole, wholes


@contextmanager
def wrappers_shown(args: Iterable[Any]) -> Iterator[None]:
    """Give tensor subclasses among `args` their own classes within the context, whose tensors AOTAutograd takes out."""
    found = [a for a in args if isinstance(a, Away) and is_traceable_wrapper_subclass(a)]
    for wrapper in found:
        show(wrapper)
    try:
        yield
    finally:
        for wrapper in found:
            hide(wrapper)


def trace_what_is_away() -> None:
    """Let torch.compile see tensors that are away as they are when they are there, until it is reset."""
    if _begin not in compilation.start_callbacks:
        compilation.register_start_callback(_begin)
        compilation.register_end_callback(_end)


_TRACING = ExitStack()


def _begin(_: Any) -> None:
    _TRACING.enter_context(patched([(*FROM_TENSOR, partialmethod(_from_tensor, FROM_TENSOR.now))]))
    for state in states():
        for resident in state.residency.residents.values():
            show(resident.tensor)
            show(resident.wrapper())
    for guard in wholes():
        show(guard.parameter)


def _end(_: Any) -> None:
    _TRACING.close()
    for state in states():
        for resident in state.residency.residents.values():
            if resident.away:
                hide(resident.tensor)
                hide(resident.wrapper())
    for guard in wholes():
        hide(guard.parameter)


def _from_tensor(mode: FakeTensorMode, plain: Callable[..., FakeTensor], tensor: Tensor, **how: Any) -> FakeTensor:
    guard = GUARDS.get(id(tensor))
    if isinstance(guard, Whole) and guard.parameter is tensor:
        return fake_parameter(mode, tensor, guard.spec.empty)
    if isinstance(guard, WrapperGuard) and guard.wrapper() is tensor and guard.is_away:
        return fake_parameter(
            mode, tensor, lambda: wrapped_again(tensor, {n: mode.from_tensor(t) for n, t in parts_of(tensor).items()})
        )
    resident = guard.resident() if isinstance(guard, TensorGuard) and guard.guards_one else None
    if resident is None or resident.tensor is not tensor:  # another may have had this identity
        return plain(mode, tensor, **how)
    if not resident.away and tensor.nbytes == tensor.untyped_storage().nbytes():  # else it has memory with others
        return plain(mode, tensor, **how)
    return fake_parameter(mode, tensor, resident.spec.empty)
