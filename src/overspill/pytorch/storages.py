"""Storages of tensors: which is which, and who else holds one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
import torch._utils
from torch import Tensor, UntypedStorage

from .patching import Target


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, equal for all tensors that share it, fake ones included."""
    return tensor.untyped_storage()._cdata


def key_of(storage: UntypedStorage) -> int:
    """Return the identity of a storage."""
    return storage._cdata


def storage_uses(storage: UntypedStorage) -> int:
    """Count the references that C++ holds to a storage."""
    return torch._C._storage_Use_Count(storage._cdata)


def uses_of_key(key: int) -> int:
    """Count the references that C++ holds to the storage of this key."""
    return torch._C._storage_Use_Count(key)


def tensor_uses(tensor: Tensor) -> int:
    """Count the references that C++ holds to a tensor."""
    return tensor._use_count()


def has_storage(tensor: Tensor) -> bool:
    """Return whether a tensor has a storage; of a subclass that wraps others it has none."""
    return torch._C._has_storage(tensor)


def storage_over(address: int, device: torch.device, nbytes: int) -> UntypedStorage:
    """Return a storage over memory with another owner, `nbytes` from `address`."""
    return torch._C._construct_storage_from_data_pointer(address, device, nbytes)


def raise_on_access(tensor: Tensor) -> None:
    """Let any kernel that asks for the memory of a tensor raise, as that of a fake tensor does."""
    torch._C._set_throw_on_mutable_data_ptr(tensor)


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd has a tensor as a view of another."""
    return tensor._is_view()


def base_of(tensor: Tensor) -> Tensor | None:
    """Return the tensor that autograd has another as a view of."""
    return tensor._base


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


AS_SUBCLASS = Target(Tensor, "_make_subclass")
"""What makes of a tensor one of a subclass, with the same storage."""


def as_subclass(kind: type[Tensor], data: Tensor, requires_grad: bool = False, **how: Any) -> Any:
    """Return `data` as an instance of `kind`, with the same storage."""
    return Tensor._make_subclass(kind, data, requires_grad, **how)


def wrapper_of(
    kind: type[Tensor], size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Any:
    """Return an instance of `kind` without memory of its own; a kernel that asks for that memory raises."""
    wrapper = torch.Tensor._make_wrapper_subclass(
        kind, size, strides=stride, dtype=dtype, device=device, storage_size=0
    )
    raise_on_access(wrapper)
    return wrapper


def rebuilt_parameter(data: Tensor, requires_grad: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return the function by which an unpickled parameter is made, and its arguments."""
    return torch._utils._rebuild_parameter, (data, requires_grad, OrderedDict())
