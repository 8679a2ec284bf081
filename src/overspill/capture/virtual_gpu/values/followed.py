"""Values that follow from what a script has itself (files, lists, what it drew on the host), kept beside the fake tensors.

They are kept by storage, as bytes of the host: views share them, and what writes in place writes there too. An op of which
all values are known is computed as well; what else is written to is not known any more.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from overspill.capture.fake_cuda.fake import tensors_in, written_tensors

aten = torch.ops.aten
_BYTES = "_overspill_bytes"  # on a fake tensor's storage: the storage of the host with the bytes of it
_MOST = 1 << 23  # elements that an op reads and makes; so one that only looks at each takes milliseconds
_MOST_MULTIPLIED = 1024  # the same of ops that do more
_MOST_BYTES = 2 << 30  # that are kept at any time
_MULTIPLY = (
    "mm",
    "bmm",
    "addmm",
    "addmv",
    "addbmm",
    "baddbmm",
    "conv",
    "_conv",
    "_scaled",
    "linalg",
    "_linalg",
    "_cdist",
)
_WITHOUT_VALUES = ("empty", "new_empty", "resize")
_FILLS = {aten.fill_.Scalar, aten.fill_.Tensor, aten.zero_.default, aten.copy_.default}
_kept_bytes = 0


def values_of(tensor: Tensor) -> Tensor | None:
    """A tensor of the host with the values of `tensor`, not to be written to; None where nobody knows them."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return tensor.constant
    return _values(tensor)


def follow(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    """Know the values of `result`, and of what `func` wrote to, if that can be; whether all of them are known."""
    if func.is_view:
        return False  # it has those of its storage
    if func.namespace == "c10d":  # writes what other processes have, and does not say where
        for tensor in tensors_in(args, []):
            _forget(tensor)
        return False
    written = written_tensors(func, args, kwargs)
    if written:
        return _write(func, args, kwargs, written)
    if not any(isinstance(output, FakeTensor) for output in _outputs(result)):
        return False
    values = computed(func, args, kwargs)
    keep(result, values)
    return values is not None


def keep(result: Any, values: Any) -> None:
    """Remember the `values` of an op's `result`, or with None that they are not known."""
    outputs = _outputs(result)
    for fake, real in zip(outputs, [None] * len(outputs) if values is None else _outputs(values), strict=True):
        if not isinstance(fake, FakeTensor):
            continue
        _forget(fake)
        fits = isinstance(real, Tensor) and (real.shape, real.dtype) == (fake.shape, fake.dtype)
        if fits and fake.layout is torch.strided and fake.nbytes == fake.untyped_storage().nbytes():
            _fill(fake, real)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What `func` returns of known values, if all are, they are not many, and nothing is drawn; else None."""
    return _computed(func, args, kwargs, ())[1]


def _computed(func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Tensor]) -> tuple[bool, Any]:
    """Whether `func` could be run on values, which changes those of `written`, and what it returned."""
    name = func._schema.name.partition("::")[2]
    if torch.Tag.nondeterministic_seeded in func.tags or func.namespace not in {"aten", "prims"}:
        return False, None
    tensors = tensors_in(kwargs.values(), tensors_in(args, []))
    if name.startswith(_WITHOUT_VALUES) or not all(_is_known(tensor) for tensor in tensors):
        return False, None
    if sum(tensor.numel() for tensor in tensors) > (_MOST_MULTIPLIED if name.startswith(_MULTIPLY) else _MOST):
        return False, None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}

    def real(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _values(value) if any(value is tensor for tensor in written) else values_of(value)
        return type(value)([real(item) for item in value]) if isinstance(value, (list, tuple)) else value

    try:
        with torch._C._DisableTorchDispatch():
            return True, func(*real(args), **{key: real(value) for key, value in kwargs.items()})
    except Exception:  # noqa: BLE001 - the op itself is run by others, and raises what it raises there
        return False, None


def _write(func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Tensor]) -> bool:
    """Let `func` write to the values of `written` too, if all that it reads is known."""
    for tensor in written:
        if isinstance(tensor, FakeTensor) and _overwrites(func, tensor):
            _fill(tensor, None)
    # What is a constant to torch alone is kept up to date by torch, and not to be written to twice.
    known = all(isinstance(tensor, FakeTensor) and _values(tensor) is not None for tensor in written)
    if known and _computed(func, args, kwargs, written)[0]:
        return True
    for tensor in written:
        _forget(tensor)
    return False


def _overwrites(func: Any, tensor: FakeTensor) -> bool:
    """Whether `func` leaves nothing in the storage of `tensor` of what was there. A weight that is filled is no data."""
    if func not in _FILLS or tensor.layout is not torch.strided or tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    return func is aten.copy_.default or not tensor.is_floating_point() or tensor.numel() <= _MOST_MULTIPLIED


# --- Bytes of the host ------------------------------------------------------------------------------------------------


def _values(tensor: Tensor) -> Tensor | None:
    """As `values_of`; who writes to them writes to those of all views of `tensor`."""
    if not isinstance(tensor, FakeTensor):
        return tensor
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    found = getattr(storage, _BYTES, None)
    if found is None or found.nbytes() != storage.nbytes():
        return None
    with torch._C._DisableTorchDispatch():
        plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return plain.set_(found, tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_known(tensor: Tensor) -> bool:
    if not isinstance(tensor, FakeTensor):
        return not tensor.is_sparse
    return tensor.constant is not None or _values(tensor) is not None


def _fill(tensor: FakeTensor, values: Tensor | None) -> None:
    """Make `values` those of all that is in the storage of `tensor`; None: they are about to be written."""
    global _kept_bytes  # noqa: PLW0603 - of the process, as is what it counts
    storage = tensor.untyped_storage()
    nbytes = storage.nbytes()
    if tensor.numel() > _MOST or _kept_bytes + nbytes > _MOST_BYTES:
        return
    made = torch.UntypedStorage(nbytes)
    setattr(storage, _BYTES, made)
    _kept_bytes += nbytes
    weakref.finalize(made, _gone, nbytes)
    if values is not None and (target := _values(tensor)) is not None:
        with torch._C._DisableTorchDispatch():
            target.copy_(values)


def _gone(nbytes: int) -> None:
    global _kept_bytes  # noqa: PLW0603
    _kept_bytes -= nbytes


def _forget(tensor: Tensor) -> None:
    if isinstance(tensor, FakeTensor) and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        if hasattr(storage, _BYTES):
            delattr(storage, _BYTES)


def _outputs(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else (result,)
