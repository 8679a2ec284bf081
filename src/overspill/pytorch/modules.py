"""An nn.Module's own state: its tables, its hooks, and how it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.nn.utils import parametrizations
from torch.utils import _device

from .patching import Target

PARAMETERS, BUFFERS, MODULES = "_parameters", "_buffers", "_modules"
"""The names of a module's tables in its instance dictionary."""
TABLES = PARAMETERS, BUFFERS, MODULES
FLAT_WEIGHTS = "_flat_weights", "_flat_weight_refs"
"""What a recurrent layer keeps of its weights besides."""
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _module._global_backward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_forward_hooks,
)
"""The hooks of all modules."""
CALL = Target(nn.Module, "_call_impl")
"""By what every module is called."""
APPLY = Target(nn.Module, "_apply")
"""By what `to`, `cuda` and `half` change a module's tensors."""
TRUNC_NORMAL = Target(nn.init, "_no_grad_trunc_normal_")
"""What draws from a normal distribution cut at both sides; it reads what it drew."""
PARSE_TO = Target(torch._C._nn, "_parse_to")
"""What reads the arguments of `to`."""
IS_ORTHOGONAL = Target(parametrizations, "_is_orthogonal")
"""What asks whether a matrix is orthogonal, by its values."""
FROM_MASK = Target(torch, "_nested_tensor_from_mask_left_aligned")
"""What asks whether a padding mask is aligned to the left, by its values."""
LAZY = "_initialize_hook"
"""The attribute of a module whose parameters have no shape yet."""
COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module that `module.compile()` has compiled."""
ORIGINAL = "_orig_mod"
"""The attribute of what torch.compile makes of a module: that module."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return a module's own table of parameters."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own table of buffers."""
    return module._buffers


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """Return a module's tables of hooks before and after forward."""
    return module._forward_pre_hooks, module._forward_hooks


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of any kind."""
    backward = module._backward_hooks or module._backward_pre_hooks
    return bool(module._forward_hooks or module._forward_pre_hooks or backward)


def as_parameter(tensor: Any) -> None:
    """Mark a tensor, in place, as one that `isinstance(tensor, nn.Parameter)` accepts."""
    tensor._is_param = True


def as_buffer(tensor: Any, *, persistent: bool) -> None:
    """Mark a tensor, in place, as one that `isinstance(tensor, nn.Buffer)` accepts."""
    tensor.persistent, tensor._is_buffer = persistent, True


def apply_to(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Change all tensors of a module, as `to` does."""
    module._apply(function)


def flat_weights(module: nn.RNNBase) -> list[Tensor]:
    """Return the weights of a recurrent layer as its kernel takes them."""
    return module._flat_weights


def device_constructors() -> set[Any]:
    """Return the functions of torch that `torch.device` as a context gives its device to; torch keeps the set."""
    return _device._device_constructors()


def torchscript_ops() -> dict[int, str]:
    """Return TorchScript's names of functions, by their ids."""
    return torch.jit._builtins._get_builtin_table()
