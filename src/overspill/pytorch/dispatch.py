"""How a call reaches a kernel: ops, dispatch keys, modes, and contexts that skip them."""

from __future__ import annotations

from typing import Any

import torch
import torch._dispatch.python
import torch.utils._mode_utils
import torch.utils._python_dispatch
from torch._C import (
    # Context: `__torch_function__` of tensor subclasses is not called.
    DisableTorchFunctionSubclass as DisableTorchFunctionSubclass,
)
from torch._C import DispatchKey as DispatchKey  # the kinds of kernels that an op may have
from torch._C import DispatchKeySet as DispatchKeySet  # several of them
from torch._C import TensorBase as TensorBase  # the class in C under Tensor, with its getters
from torch._ops import HigherOrderOperator as HigherOrderOperator  # ops that take functions, as torch.cond
from torch._ops import OperatorBase as OperatorBase  # what all ops are
from torch._ops import OpOverload as OpOverload  # one overload of an op, as aten.add.Tensor
from torch._ops import OpOverloadPacket as OpOverloadPacket  # all overloads of an op, as aten.add
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # a mode that sees each op

AutoDispatchBelowAutograd = torch._C._AutoDispatchBelowAutograd
"""Context: ops skip autograd."""
DisableAutocast = torch._C._DisableAutocast
"""Context: ops skip autocast."""
DisableTorchDispatch = torch._C._DisableTorchDispatch
"""Context: ops skip modes and `__torch_dispatch__`."""
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
"""Context: ops skip the kernels of these keys."""
disabled_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a class that has none."""
all_op_names = torch._C._dispatch_get_all_op_names
"""The qualified names of all ops."""
ops_with_kernel = torch._C._dispatch_get_registrations_for_dispatch_key
"""The ops with a kernel of a key, by names."""
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
"""Whether an op, by name, has a kernel of a key."""
no_python_dispatcher = torch._dispatch.python.no_python_dispatcher
"""Context: ops skip kernels registered in Python."""
no_dispatch = torch.utils._mode_utils.no_dispatch
"""Context: ops skip modes and subclasses."""
push_mode = torch.utils._python_dispatch._push_mode
"""Let a mode see ops from now on; torch.compile does not ask whether one does, as it does in its context."""
pop_mode = torch.utils._python_dispatch._pop_mode
"""End the last one."""
disable_current_modes = torch.utils._python_dispatch._disable_current_modes
"""Context: no mode is active."""
is_traceable_wrapper_subclass = torch.utils._python_dispatch.is_traceable_wrapper_subclass
"""Whether a tensor wraps others, as DTensor."""


def forget_dispatch(op: OpOverload) -> None:
    """Let PyTorch look again which kernel an op has: its answers are cached by key."""
    op._dispatch_cache.clear()


def call_kernel(op: OpOverload, key: DispatchKey, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel of `op` for a key, whatever the inputs are."""
    return op._op_dk(key, *args, **kwargs)


def overload_name(op: OpOverload) -> str:
    """Return the name of an overload within its packet, as "Tensor" of aten.add.Tensor."""
    return op._overloadname


def schema_of(op: Any) -> Any:
    """Return the schema of an op (torch.FunctionSchema), or None for a callable that has none."""
    return getattr(op, "_schema", None)


def close_library(library: torch.library.Library) -> None:
    """Undo the registrations of a library."""
    library._destroy()


def check_elements(value: torch.Tensor, message: str) -> None:
    """Raise RuntimeError with `message` if a tensor of one element is zero; on a GPU, when the GPU evaluates it."""
    torch._assert_async(value, message)
