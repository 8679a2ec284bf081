"""Values of small tensors that a script put on the device itself, kept beside the fake ones: lengths, shapes, counters.

An op on a few elements whose values are all known is computed as well. What is written to is no longer known, which
torch's own version counters tell, for views too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from overspill.capture.fake_cuda.fake import tensors_in

_VALUES = "_overspill_values"
_MOST = 1024  # elements
_FROM_NOTHING = {"arange", "zeros", "ones", "full", "scalar_tensor"}
_FROM_HOST = {"_to_copy", "lift_fresh"}


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor of the host with the values of `tensor`; None where nobody knows them."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if tensor.constant is not None:
        return tensor.constant
    values, version = getattr(tensor, _VALUES, (None, 0))
    return values if values is not None and version == tensor._version else None


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func` returns of known values, if all are, few, and nothing is written or drawn; else None."""
    tensors = tensors_in(kwargs.values(), tensors_in(args, []))
    hosts_own = not any(isinstance(tensor, FakeTensor) for tensor in tensors)
    if hosts_own and func._schema.name.partition("::")[2] not in (_FROM_HOST if tensors else _FROM_NOTHING):
        return None
    if func._schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if any(tensor.numel() > _MOST or tensor.is_sparse or values_of(tensor) is None for tensor in tensors):
        return None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        with torch._C._DisableTorchDispatch():
            return func(*_real(args), **{name: _real(value) for name, value in kwargs.items()})
    except Exception:  # noqa: BLE001 - the op itself is run by others, and raises what it raises there
        return None


def keep(result: Any, values: Any) -> None:
    """Remember the `values` of an op's `result`."""
    for fake, real in zip(_outputs(result), _outputs(values), strict=False):
        if not isinstance(fake, FakeTensor) or not isinstance(real, Tensor) or fake.is_inference():
            continue
        if fake.constant is None and real.numel() <= _MOST and fake.shape == real.shape:
            setattr(fake, _VALUES, (real, fake._version))


def _outputs(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else (result,)


def _real(value: Any) -> Any:
    if isinstance(value, Tensor):
        return values_of(value)
    return type(value)([_real(item) for item in value]) if isinstance(value, (list, tuple)) else value
