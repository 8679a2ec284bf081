"""Tensor methods for the virtual GPU: device, moves, and new parameters."""

from __future__ import annotations

import sys
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import UnsupportedError
from overspill.pytorch.dispatch import is_traceable_wrapper_subclass
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.modules import PARSE_TO
from overspill.pytorch.patching import Patches
from overspill.pytorch.storages import AS_SUBCLASS

from .torch_patches import GPU, UninitializedTensorMixin, fake_class
from .values.frames import user_line

CPU = torch.device("cpu")


class TensorMethods:
    """Replacements for tensor methods, which keep the originals."""

    def __init__(self, recorder: Recorder, mode: FastFakeMode) -> None:
        self._recorder, self._mode = recorder, mode
        self._thread = get_ident()
        self._to, self._cpu_device = Tensor.to, FakeTensor.device
        self._new_parameter = nn.Parameter.__new__

    def replacements(self) -> Patches:
        """Return (owner, name, replacement) for all of them."""
        recorder, mode, moved, share = self._recorder, self._mode, self.moved, Tensor.share_memory_

        def device(tensor: FakeTensor) -> torch.device:
            if not mode.computing and not tensor.fake_mode.in_kernel_invocation and recorder.on_device(tensor):
                return GPU
            return self._cpu_device.fget(tensor)

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # binds to the tensor, as a method does not
            return moved(tensor, *args, **kwargs)

        return [
            # Where a tensor is.
            (FakeTensor, "device", property(device)),
            (FakeTensor, "is_cuda", property(lambda tensor: not mode.computing and recorder.on_device(tensor))),
            (FakeTensor, "is_cpu", property(lambda tensor: tensor.device.type == "cpu")),
            # How it moves.
            (Tensor, "to", to),
            (Tensor, "type_as", to),
            (Tensor, "cuda", lambda tensor, *_, **__: moved(tensor, GPU)),
            (Tensor, "cpu", lambda tensor, *_, **__: moved(tensor, CPU)),
            (Tensor, "pin_memory", lambda tensor, *_: tensor),
            (Tensor, "is_pinned", lambda _tensor, *_: False),
            (Tensor, "get_device", lambda tensor: 0 if recorder.on_device(tensor) else -1),
            (Tensor, "share_memory_", lambda tensor: tensor if recorder.on_device(tensor) else share(tensor)),
            (Tensor, "record_stream", lambda _tensor, _stream: None),
            (nn.Parameter, "__new__", staticmethod(self._parameter)),
            (FakeTensor, "__new__", staticmethod(_again(FakeTensor.__new__))),
            (*AS_SUBCLASS, staticmethod(_as_subclass(AS_SUBCLASS.now))),
        ]

    def moved(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Tensor.to` between the host and the virtual GPU.

        Raises UnsupportedError for a move to the GPU in another thread.
        """
        if self._mode.computing:
            return self._to(tensor, *args, **kwargs)
        if isinstance(tensor, UninitializedTensorMixin):  # a lazy module's, which would not tell its shape
            return self._moved_uninitialized(tensor, *args, **kwargs)
        target, dtype, memory_format, copy = _parse_to(args, kwargs)
        if target is not None and target.type == "meta":
            return self._to(tensor, target, dtype)
        # Where it is, and where it goes.
        here = self._recorder.on_device(tensor)
        there = here if target is None else target.type == "cuda"
        if there and get_ident() != self._thread:  # fake tensors exist in the thread of the mode alone
            where = user_line(sys._getframe(1))
            raise UnsupportedError(f"{where} uses cuda in a thread of its own; an estimate sees the main thread")
        options: dict[str, Any] = {"dtype": dtype or tensor.dtype, "copy": copy or here != there}
        if memory_format is not None:
            options["memory_format"] = memory_format
        # A move that autograd sees is a function of its own.
        if here == there:
            return self._to(tensor, **options)
        if torch.is_grad_enabled() and tensor.requires_grad:
            return _Crossing.apply(tensor, self, there, options)
        return self.copied(tensor, on_device=there, **options)

    def copied(self, tensor: Tensor, *, on_device: bool, **options: Any) -> Tensor:
        """Return a copy of `tensor` on the device, or on the host."""
        with self._recorder.placing(on_device=on_device):
            return self._to(tensor, CPU, **options)

    def _moved_uninitialized(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        kind, tensor.__class__ = tensor.__class__, FakeTensor
        result: Any = self.moved(tensor, *args, **kwargs)
        result.__dict__.update(tensor.__dict__)
        tensor.__class__ = result.__class__ = kind
        return result

    def _parameter(self, cls: type, data: Tensor | None = None, requires_grad: bool = True) -> Any:
        """Make `nn.Parameter(data)` with fake data, so that a model on the host takes no memory."""
        if data is not None and not isinstance(data, FakeTensor) and not is_traceable_wrapper_subclass(data):
            data = self._mode.like(data.detach())
        made = self._new_parameter(cls, data, requires_grad)
        if cls is not nn.Parameter and type(made) is FakeTensor:
            made.__class__ = cls if issubclass(cls, FakeTensor) else fake_class(cls)
        return made


def _again(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `FakeTensor.__new__` to take data too, as in `type(parameter)(data, **parameter.__dict__)`."""

    def make(cls: type, first: Any, *args: Any, requires_grad: bool = True, **kwargs: Any) -> Any:
        if isinstance(first, Tensor):
            return nn.Parameter(first, requires_grad)
        return original(cls, first, *args, **kwargs)

    return make


def _as_subclass(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor._make_subclass`, by which libraries make parameters of their own, to take fake data too."""

    def make(cls: type, data: Tensor, require_grad: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(data, FakeTensor) or cls is nn.Parameter:
            return original(cls, data, require_grad, *args, **kwargs)
        made = data.detach().requires_grad_(require_grad)
        made.__class__ = fake_class(cls)
        return made

    return make


class _Crossing(torch.autograd.Function):
    """A move between host and device, both ways: to autograd both are the CPU."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, methods: TensorMethods, there: bool, options: dict[str, Any]) -> Tensor:
        """Return the copy on the other side."""
        ctx.back = methods, not there, tensor.dtype
        return methods.copied(tensor, on_device=there, **options)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """Return the gradient, where the tensor was."""
        methods, there, dtype = ctx.back
        return methods.copied(grad, on_device=there, dtype=dtype, copy=True), None, None, None


def _parse_to(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None, bool]:
    """Return device, dtype, memory format and copy of a call of `Tensor.to`."""
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], Tensor):
        other, args = args[0], args[1:]
    if isinstance(other, Tensor):
        copy = copy or (len(args) > 1 and bool(args[1]))
        return other.device, other.dtype, kwargs.get("memory_format"), copy
    if len(args) == 4 or (len(args) == 3 and isinstance(args[0], torch.dtype)):  # ... non_blocking, copy
        args, copy = args[:-1], bool(args[-1])
    device, dtype, _, memory_format = PARSE_TO.now(*args, **kwargs)
    return device, dtype, memory_format, copy
