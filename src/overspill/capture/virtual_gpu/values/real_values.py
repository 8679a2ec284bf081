"""Keep real values alongside fake tensors, where they follow from constants or from a program's own data.

Its own data are files, lists, and samples drawn on the host. Values are kept by storage, as bytes on the host: views
share them, and in-place writes change them. An op whose inputs are all known is computed as well. Any other tensor that
is written becomes unknown, a fake one as well as a real one of the host. Of a tensor too large for that, one value for
all of its elements may be known.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.capture.fake_cuda.fake import FastFakeMode, tensors_in, written_tensors
from overspill.pytorch.dispatch import DisableTorchDispatch, schema_of
from overspill.pytorch.fake_tensors import FakeTensor

aten = torch.ops.aten
_BYTES = "_overspill_bytes"  # on a fake tensor's storage: a host storage with its values
_UNKNOWN = "_overspill_unknown"  # on a real storage into which unknown values were written: an _Unknown
_ALL = "_overspill_all"  # on a fake tensor's storage: the value of all its elements, or NONZERO
NONZERO = object()
"""What is known of the numbers of a batch: none is exactly 0, as in an image that is not padding."""
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
_COPIES = {
    aten._to_copy.default, aten.clone.default, aten._unsafe_view.default, aten.index.Tensor,
    aten.upsample_nearest2d.default, aten.upsample_nearest2d.vec,
}  # fmt: skip
"""Ops whose results have elements of their first argument alone."""
_HOST = torch.device("cpu")
_DRAWN_DATA = {
    aten.randint.default,
    aten.randint.low,
    aten.randperm.default,
}  # of whole numbers; on the host they are data
_kept_bytes = 0


class _Unknown:
    """Lives as long as a real storage whose values are unknown; `count` of them are alive."""

    count = 0

    def __init__(self) -> None:
        _Unknown.count += 1

    def __del__(self) -> None:
        _Unknown.count -= 1


def is_any_unknown() -> bool:
    """Return whether any real tensor has unknown values."""
    return _Unknown.count > 0


def is_unknown(tensor: Tensor) -> bool:
    """Return whether `tensor` is a real one, and unknown values were written into it or a view of it."""
    return is_any_unknown() and tensor.layout is torch.strided and hasattr(tensor.untyped_storage(), _UNKNOWN)


def without_values(value: Any, mode: FastFakeMode) -> Any:
    """Return a fake tensor of `mode` for a real one whose values are unknown, otherwise `value`."""
    return mode.like(value) if isinstance(value, Tensor) and is_unknown(value) else value


def touches_unknown(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether `func` reads or writes a real tensor whose values are unknown; making a view does neither."""
    if not is_any_unknown() or func.is_view or torch.Tag.inplace_view in func.tags:
        return False
    return any(map(is_unknown, tensors_in(kwargs.values(), tensors_in(args, []))))


def values_of(tensor: Tensor) -> Tensor | None:
    """Return the values of `tensor` on the host, read-only, or None if unknown."""
    if isinstance(tensor, FakeTensor) and tensor.constant is not None:
        return tensor.constant
    return _values(tensor)


def follow(func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> bool:
    """Compute values of `result` and of written tensors if possible; return whether all are known."""
    if func.is_view or func.namespace == "c10d":
        # A view has those of its storage. Collectives write what other processes have, and do not say where.
        for tensor in () if func.is_view else tensors_in(args, []):
            if isinstance(tensor, FakeTensor):  # all processes have the same on their hosts
                forget(tensor)
        return False
    # In-place ops write the kept values; others make new ones.
    written = written_tensors(func, args, kwargs)
    if written:
        return _write(func, args, kwargs, written)
    made = [output for output in _outputs(result) if isinstance(output, FakeTensor)]
    if len(made) == 1 and made[0] is result and (every := _every(func, args, result)) is not None:
        return _keep_every(result, every)
    if not made or sum(tensor.numel() for tensor in made) > _MOST:  # as a tensor of zeros, which reads nothing
        return False
    values = computed(func, args, kwargs)
    keep(result, values)
    return values is not None


def know_nonzero(tensor: Tensor) -> None:
    """Note that no element of a fake `tensor` is 0."""
    if isinstance(tensor, FakeTensor):
        setattr(tensor.untyped_storage(), _ALL, NONZERO)


def _every(func: Any, args: Any, result: Tensor) -> Any:
    """Return the value of all elements of the `result` of `func`, or NONZERO, or None if they may differ."""
    if func is aten.ones.default:
        return 1 if result.numel() > _MOST else None
    first = args[0] if args else None
    if not isinstance(first, FakeTensor) or (every := getattr(first.untyped_storage(), _ALL, None)) is None:
        return None
    if func in _COPIES:
        return None if every is NONZERO and not result.is_floating_point() else every
    if func in (aten.eq.Scalar, aten.ne.Scalar):
        return func is aten.ne.Scalar if every is NONZERO and args[1] == 0 else None
    if func is aten.sum.dim_IntList and every is not NONZERO:
        return every * (first.numel() // result.numel()) if result.numel() else None
    return None


def _keep_every(tensor: FakeTensor, every: Any) -> bool:
    """Keep the value of all elements of `tensor`; return whether it is known."""
    if every is NONZERO or tensor.numel() > _MOST:
        setattr(tensor.untyped_storage(), _ALL, every)
        return every is not NONZERO
    with DisableTorchDispatch():
        keep(tensor, torch.full(tuple(tensor.shape), every, dtype=tensor.dtype, device="cpu"))
    return True


def keep(result: Any, values: Any) -> None:
    """Store the `values` of an op's `result`; None: they are unknown."""
    outputs = _outputs(result)
    for fake, real in zip(outputs, [None] * len(outputs) if values is None else _outputs(values), strict=True):
        if not isinstance(fake, FakeTensor):
            continue
        forget(fake)
        fits = isinstance(real, Tensor) and (real.shape, real.dtype) == (fake.shape, fake.dtype)
        if fits and fake.layout is torch.strided and fake.nbytes == fake.untyped_storage().nbytes():
            _fill(fake, real)


def computed(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return the result of `func` on known values, or None if unknown, random or large."""
    return _computed(func, args, kwargs, ())[1]


def _computed(func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Tensor]) -> tuple[bool, Any]:
    """Run `func` on known values, changing those of `written`; return success and result."""
    # Most ops read weights, of which nothing is known.
    tensors = tensors_in(kwargs.values(), tensors_in(args, []))
    if not all(map(_is_known, tensors)):
        return False, None
    name = schema_of(func).name.partition("::")[2]
    if func.namespace not in {"aten", "prims"} or (
        torch.Tag.nondeterministic_seeded in func.tags and not _is_data(func, kwargs)
    ):
        return False, None
    # Only small ops.
    if name.startswith(_WITHOUT_VALUES):
        return False, None
    if sum(tensor.numel() for tensor in tensors) > (_MOST_MULTIPLIED if name.startswith(_MULTIPLY) else _MOST):
        return False, None
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    try:
        with DisableTorchDispatch():
            return True, func(*_real(args, written), **{key: _real(value, written) for key, value in kwargs.items()})
    except Exception:  # noqa: BLE001 - the op itself is run by others, and raises what it raises there
        return False, None


def _is_data(func: Any, kwargs: dict[str, Any]) -> bool:
    return func in _DRAWN_DATA and (kwargs.get("device") or _HOST) == _HOST


def _real(value: Any, written: Sequence[Tensor]) -> Any:
    """Return an argument with the values of its tensors.

    A function of the module: a local one that calls itself is a cycle, in which tensors would stay alive.
    """
    if isinstance(value, Tensor):
        return _values(value) if any(value is tensor for tensor in written) else values_of(value)
    return type(value)([_real(item, written) for item in value]) if isinstance(value, (list, tuple)) else value


def _write(func: Any, args: Any, kwargs: dict[str, Any], written: Sequence[Tensor]) -> bool:
    """Let `func` write the kept values of `written` too, and return True; forget them if it reads unknown ones."""
    for tensor in written:
        if isinstance(tensor, FakeTensor) and hasattr(tensor.untyped_storage(), _ALL):
            delattr(tensor.untyped_storage(), _ALL)
        if _overwrites(func, tensor):
            _fill(tensor, None)
    # torch itself updates what only it knows as a constant, and real tensors by such; a second write would be wrong.
    real = not all(isinstance(tensor, FakeTensor) for tensor in written)
    inputs = tensors_in(kwargs.values(), tensors_in(args, [])) if real else written
    if real and all(not isinstance(tensor, FakeTensor) or tensor.constant is not None for tensor in inputs):
        known = all(map(_is_known, inputs))
    else:
        known = all(_bytes(one) is not None if isinstance(one, FakeTensor) else _is_known(one) for one in written)
        known = known and _computed(func, args, kwargs, written)[0]
    if known:
        return True
    for tensor in written:
        forget(tensor)
    return False


def _overwrites(func: Any, tensor: Tensor) -> bool:
    """Return whether `func` overwrites all of the storage of `tensor`; filled weights do not count as data."""
    if func not in _FILLS or tensor.layout is not torch.strided or tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    return func is aten.copy_.default or not tensor.is_floating_point() or tensor.numel() <= _MOST_MULTIPLIED


# --- Bytes of the host ------------------------------------------------------------------------------------------------


def _values(tensor: Tensor) -> Tensor | None:
    """Return the same as `values_of`, but writes to it change the values of all views of `tensor`."""
    if not isinstance(tensor, FakeTensor):
        return None if is_unknown(tensor) else tensor
    if (found := _bytes(tensor)) is None:
        return None
    with DisableTorchDispatch():
        plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
        return plain.set_(found, tensor.storage_offset(), tensor.shape, tensor.stride())


def _bytes(tensor: FakeTensor) -> torch.UntypedStorage | None:
    """Return the values of the storage of `tensor`, if they are known."""
    if tensor.layout is not torch.strided:
        return None
    storage = tensor.untyped_storage()
    found: torch.UntypedStorage | None = getattr(storage, _BYTES, None)
    if found is None or found.nbytes() != storage.nbytes() or tensor.is_conj() or tensor.is_neg():
        return None
    return found


def _is_known(tensor: Tensor) -> bool:
    if not isinstance(tensor, FakeTensor):
        return not tensor.is_sparse and not is_unknown(tensor)
    return tensor.constant is not None or _bytes(tensor) is not None


def _fill(tensor: Tensor, values: Tensor | None) -> None:
    """Keep `values` as those of the whole storage of `tensor`; None: they are about to be written."""
    global _kept_bytes  # noqa: PLW0603 - of the process, as is what it counts
    storage = tensor.untyped_storage()
    if not isinstance(tensor, FakeTensor):
        if hasattr(storage, _UNKNOWN):
            delattr(storage, _UNKNOWN)
        return
    nbytes = storage.nbytes()
    if tensor.numel() > _MOST or _kept_bytes + nbytes > _MOST_BYTES:
        return
    made = torch.UntypedStorage(nbytes)
    setattr(storage, _BYTES, made)
    _kept_bytes += nbytes
    weakref.finalize(made, _gone, nbytes)
    if values is not None and (target := _values(tensor)) is not None:
        with DisableTorchDispatch():
            target.copy_(values)


def _gone(nbytes: int) -> None:
    global _kept_bytes  # noqa: PLW0603
    _kept_bytes -= nbytes


def forget(tensor: Tensor) -> None:
    """Mark the values of `tensor` as unknown from now on."""
    if tensor.layout is not torch.strided:
        return
    storage = tensor.untyped_storage()
    if not isinstance(tensor, FakeTensor):
        setattr(storage, _UNKNOWN, _Unknown())
    elif hasattr(storage, _BYTES):
        delattr(storage, _BYTES)


def _outputs(result: Any) -> Any:
    return result if isinstance(result, (list, tuple)) else (result,)
