"""Patches of torch where fake tensors differ from CUDA's, or need a driver."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import parameter

from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.pytorch import fake_tensors
from overspill.pytorch.dispatch import disabled_torch_function
from overspill.pytorch.distributed import LOCAL
from overspill.pytorch.fake_tensors import FakeTensor, current_fake_mode
from overspill.pytorch.modules import (
    APPLY,
    FROM_MASK,
    IS_ORTHOGONAL,
    PARSE_TO,
    TRUNC_NORMAL,
    apply_to,
    as_buffer,
    buffers_of,
    device_constructors,
    flat_weights,
    parameters_of,
    torchscript_ops,
)
from overspill.pytorch.patching import Patches, patched
from overspill.pytorch.trees import tree_map_only

GPU = torch.device("cuda", 0)
_DEVICE = torch.device
UninitializedTensorMixin: Any = parameter.UninitializedTensorMixin  # type: ignore[attr-defined]
_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "logspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like", "randperm",
    "scalar_tensor", "tensor", "zeros", "zeros_like",
)  # fmt: skip
_TYPES = {
    "FloatTensor": torch.float32, "DoubleTensor": torch.float64, "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16, "ByteTensor": torch.uint8, "CharTensor": torch.int8, "ShortTensor": torch.int16,
    "IntTensor": torch.int32, "LongTensor": torch.int64, "BoolTensor": torch.bool,
}  # fmt: skip


def fake_weights() -> Patches:
    """Return patches that skip torch's rejection sampling for fake weights and their shards.

    It reads its samples, and these have no values.
    """
    original = TRUNC_NORMAL.now

    def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        fake = isinstance(getattr(tensor, LOCAL, tensor), FakeTensor)
        return tensor if fake else original(tensor, *args, **kwargs)

    return [(*TRUNC_NORMAL, fill)]


def torch_patches(recorder: Recorder) -> Patches:
    """Return (owner, name, replacement) for all of them except factories."""

    def nothing(*_: Any, **__: Any) -> int:
        return 0

    return [
        # Types and copies of tensors.
        *((torch.cuda, name, _tensor_type(name, dtype)) for name, dtype in _TYPES.items()),
        (Tensor, "type", _as_type(Tensor.type, recorder)),
        *_lazy(),
        (FakeTensor, "__deepcopy__", _deep_copy),
        (*fake_tensors.GPU_CONTEXT, nothing),
        # Transformers, which asks whether it is traced, makes other masks then.
        (*fake_tensors.CLASS, _FakeToTorch),
        *((torch.cuda.nvtx, name, nothing) for name in ("range_push", "range_pop", "range_start", "range_end", "mark")),
        # Modules and initialisation.
        (nn.DataParallel, "scatter", _scatter),
        (nn.RNNBase, "flatten_parameters", _flatten(recorder)),
        (*APPLY, _apply),
        *fake_weights(),
        (
            fake_tensors.fake_log,
            "disabled",
            not os.environ.get("OVERSPILL_DEBUG"),
        ),  # the error itself says what is wrong
        # Devices by number, and tests of values.
        (torch, "device", _DeviceByNumber),
        (*PARSE_TO, _parse_to(PARSE_TO.now)),
        (*FROM_MASK, lambda *_: False),  # padded batches stay as they are
        (*IS_ORTHOGONAL, lambda *_, **__: False),  # no random matrix is
    ]


class _Disguised(type(FakeTensor)):  # type: ignore[misc]
    """Reports fake tensors as FakeTensor to torch alone; to others they are tensors on a GPU."""

    def __instancecheck__(cls, value: Any) -> bool:
        asks = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        return isinstance(value, FakeTensor) and asks in {"torch", "overspill"}

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, FakeTensor)


class _FakeToTorch(FakeTensor, metaclass=_Disguised):
    """Replaces `torch._subclasses.FakeTensor` meanwhile."""


# --- Devices by number, tensors by type -------------------------------------------------------------------------------


@contextmanager
def factories() -> Iterator[None]:
    """Make torch's factories take GPUs by number and ignore pinning, inside the block."""
    originals = {name: getattr(torch, name) for name in _FACTORIES}
    device_constructors()  # torch keeps this set: it must not be made of the replacements
    table = torchscript_ops()
    replacements = {name: _factory(original) for name, original in originals.items()}
    known = {id(new): table.get(id(originals[name])) for name, new in replacements.items()}
    table.update({key: op for key, op in known.items() if op is not None})  # TorchScript goes by identity
    try:
        with patched([(torch, name, new) for name, new in replacements.items()]):
            yield
    finally:
        for key in known:
            table.pop(key, None)


def _factory(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if type(device) is int:
            kwargs["device"] = _DEVICE("cuda", device)
        elif str(device) == "cuda":  # torch looks for the current one itself, to copy an array there
            kwargs["device"] = GPU
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return original(*args, **kwargs)

    return make


def _parse_to(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the parser of arguments of `to`, of tensors, modules and packed sequences, to take GPUs by number."""

    def number(value: Any) -> Any:
        return _DEVICE("cuda", value) if type(value) is int else value

    def parse(*args: Any, **kwargs: Any) -> Any:
        return original(*map(number, args), **{name: number(value) for name, value in kwargs.items()})

    return parse


class _DeviceType(type):
    """Metaclass of `torch.device` that takes GPUs by number, for which torch queries the driver."""

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        return _DEVICE("cuda", *args) if len(args) == 1 and type(args[0]) is int else _DEVICE(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _DEVICE)


class _DeviceByNumber(metaclass=_DeviceType):
    """Replaces `torch.device`; its instances are torch's own."""


_DeviceByNumber.__name__ = _DeviceByNumber.__qualname__ = "device"
_DeviceByNumber.__module__ = "torch"


class _TensorType(type):
    """Metaclass of `torch.cuda.FloatTensor` and others: makes device tensors from sizes or data."""

    dtype: torch.dtype
    is_cuda = True

    def __call__(cls, *args: Any) -> Tensor:
        if args and not isinstance(args[0], int):
            return torch.tensor(args[0], dtype=cls.dtype, device=GPU)
        return torch.empty(args, dtype=cls.dtype, device=GPU)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.dtype is cls.dtype and instance.is_cuda


def _tensor_type(name: str, dtype: torch.dtype) -> type:
    return _TensorType(name, (), {"dtype": dtype, "__module__": "torch.cuda"})


def _as_type(original: Callable[..., Any], recorder: Recorder) -> Callable[..., Any]:
    """Wrap `Tensor.type`: the name of a tensor's type, or the tensor converted and moved to another."""

    def type_(tensor: Tensor, dtype: Any = None, *_: Any, **__: Any) -> Any:
        if dtype is None:
            name: str = original(tensor)
            cuda = recorder.on_device(tensor) and not name.startswith("torch.cuda.")
            return name.replace("torch.", "torch.cuda.", 1) if cuda else name
        # A conversion: by dtype, by name, or by a type of torch.cuda.
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype)
        if isinstance(dtype, str):
            module, _dot, kind = dtype.rpartition(".")
            if kind not in _TYPES:
                raise ValueError(f"invalid type: {dtype!r}")
            return tensor.to(GPU if module == "torch.cuda" else "cpu", _TYPES[kind])
        return tensor.to(GPU if isinstance(dtype, _TensorType) else "cpu", dtype.dtype)

    return type_


# --- Parameters -------------------------------------------------------------------------------------------------------


@cache
def fake_class(kind: type) -> type:
    """Return a subclass of both `kind` (of parameters or buffers) and FakeTensor."""
    own = {"__module__": kind.__module__, "__torch_function__": disabled_torch_function}
    return type(kind)(kind.__name__, (kind, FakeTensor), own)


def _lazy() -> Patches:
    """Return patches that make parameters and buffers of lazy modules fake from the start, without elements."""

    def make_parameter(_: type, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        made = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad)
        made.__class__ = fake_class(parameter.UninitializedParameter)
        return made

    def make_buffer(
        _: type, requires_grad: bool = False, device: Any = None, dtype: Any = None, persistent: bool = True
    ) -> Any:
        made: Any = nn.Parameter(torch.empty(0, device=device, dtype=dtype), requires_grad).detach()
        as_buffer(made, persistent=persistent)
        made.__class__ = fake_class(parameter.UninitializedBuffer)
        return made

    # Once the shape is known they become plain fake tensors.
    def materialize(self: Any, shape: Any, device: Any = None, dtype: Any = None) -> None:
        self.__class__ = FakeTensor
        self.data = torch.empty(shape, device=device or self.device, dtype=dtype or self.dtype)

    return [
        (parameter.UninitializedParameter, "__new__", staticmethod(make_parameter)),
        (parameter.UninitializedBuffer, "__new__", staticmethod(make_buffer)),
        (UninitializedTensorMixin, "materialize", materialize),
    ]


def _deep_copy(tensor: Any, memo: dict[int, Any]) -> Any:
    """Run `Tensor.__deepcopy__` without copying the fake mode with the tensor."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    # As torch copies: values, gradient, attributes and class.
    if not tensor.is_leaf:
        raise RuntimeError("Only Tensors created explicitly by the user support the deepcopy protocol")  # torch's words
    with torch.no_grad():
        made: Any = tensor.clone()
    made.requires_grad_(tensor.requires_grad)
    memo[id(tensor)] = made
    if tensor.grad is not None and not isinstance(tensor, nn.Parameter):  # Parameter.__deepcopy__ leaves it out
        made.grad = copy.deepcopy(tensor.grad, memo)
    own = {name: value for name, value in tensor.__dict__.items() if name not in made.__dict__}
    made.__dict__.update(copy.deepcopy(own, memo))
    made.__class__ = tensor.__class__
    return made


def _apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Run `nn.Module._apply` as for plain tensors.

    torch would swap fake ones, which their weak references forbid.
    """
    if recurse:
        for child in self.children():
            apply_to(child, fn)  # as torch: a module of the script may take no more
    for name, own in parameters_of(self).items():
        if own is not None:
            with torch.no_grad():
                parameters_of(self)[name] = _applied_to_parameter(own, fn, f"{name} of {type(self).__name__}")
    for key, buffer in buffers_of(self).items():
        if buffer is not None:
            buffers_of(self)[key] = _applied_to_buffer(buffer, fn)
    return self


def _applied_to_parameter(own: nn.Parameter, fn: Callable[[Tensor], Tensor], name: str) -> nn.Parameter:
    """Return the same parameter with `fn(own)` as data; a new one to or from `meta`.

    Raises RequestError if it was made before the estimate began, so it cannot move to the GPU.
    """
    applied = fn(own)
    if isinstance(applied, FakeTensor) and not isinstance(own, FakeTensor):
        raise RequestError(
            f"parameter {name} was made before the estimate began, so it cannot "
            "move to cuda in it; build the model inside the function that is estimated, or move a deep copy"
        )
    if applied is not own and "meta" in {applied.device.type, own.device.type}:
        return nn.Parameter(applied, own.requires_grad)
    if applied is not own:
        own.data = applied
    if own.grad is not None:
        own.grad.data = fn(own.grad)
    return own


def _applied_to_buffer(buffer: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Return `fn(buffer)`; on the device the result is fake, and its value is not kept."""
    if isinstance(buffer, FakeTensor) or type(buffer) is not Tensor:
        return fn(buffer)
    mode: FastFakeMode = current_fake_mode()
    applied = fn(mode.like(buffer))
    return applied if applied.device.type == "cuda" else fn(buffer)


# --- Modules ----------------------------------------------------------------------------------------------------------


def _scatter(_: nn.DataParallel, inputs: Any, kwargs: Any, device_ids: Any) -> tuple[Any, Any]:
    """Run `DataParallel.scatter` to the only GPU. Raises RequestError for several."""
    if len(device_ids) > 1:
        raise RequestError(
            f"DataParallel over {len(device_ids)} GPUs; an estimate has one; give it one, or take "
            "DistributedDataParallel"
        )
    return tree_map_only(Tensor, lambda tensor: tensor.to(GPU), ((inputs,), (kwargs or {},)))


def _flatten(recorder: Recorder) -> Callable[..., None]:
    """Return a function that copies all weights to one buffer and makes them views of it.

    As torch/nn/modules/rnn.py, `flatten_parameters`.
    """

    def flatten_parameters(module: nn.RNNBase) -> None:
        weights = [weight for weight in flat_weights(module) if isinstance(weight, FakeTensor)]
        there = weights and all(recorder.on_device(weight) and weight.is_floating_point() for weight in weights)
        if not there or not torch.backends.cudnn.enabled:
            return
        with torch.no_grad():
            buffer, start = torch.empty(sum(w.numel() for w in weights), dtype=weights[0].dtype, device=GPU), 0
            for weight in weights:
                piece = buffer[start : start + weight.numel()].view(weight.shape)
                weight.data = piece.copy_(weight)
                start += weight.numel()

    return flatten_parameters
