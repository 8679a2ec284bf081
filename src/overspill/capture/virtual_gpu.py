"""A GPU that is not there: inside `VirtualGpu`, a PyTorch program that asks for `cuda` runs, on fake tensors.

Tensors on the device are fake CPU tensors that the recorder knows; to the program they say that they are on `cuda:0`.
What cannot be known without computing, the value of a device tensor, comes out as an `UnknownNumber`, which may be
printed and averaged but not decided upon.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import get_ident
from types import FrameType, FunctionType
from typing import Any, NoReturn

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overspill.core.errors import UnsupportedError

from . import distributed
from .assumptions import finite, goes_on, initial_scale
from .autocast import cuda_autocast
from .cuda_module import CudaFunctions
from .fake import FastFakeMode
from .recorder import Recorder
from .retarget import retargeted

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
# torch.optim deletes the names of its own modules.
optimizer_hooks, lbfgs = sys.modules["torch.optim.optimizer"], sys.modules["torch.optim.lbfgs"]


class UnknownNumber(float):
    """The value of a tensor that was never computed: prints, adds and averages, but decides nothing."""

    def __new__(cls, *_: object) -> UnknownNumber:
        """One that is finite to whoever asks the C library."""
        return super().__new__(cls, 1.0)

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "unknown"

    def _unknown(self, *_: object) -> UnknownNumber:
        return UnknownNumber()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __neg__ = __pow__ = __rpow__ = __abs__ = __floordiv__ = __mod__ = __round__ = _unknown  # type: ignore[assignment]

    def _decides(self, *_: object) -> bool:
        if (answer := goes_on(sys._getframe(1))) is not None:
            return answer
        raise data_dependent()

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = __index__ = _decides  # type: ignore[assignment]
    __hash__ = float.__hash__


def data_dependent() -> UnsupportedError:
    """The error for a program whose way depends on a value; it names the user's line."""
    where = user_line(sys._getframe(1))
    return UnsupportedError(
        f"{where} needs the value of a tensor, which an estimate does not compute; "
        "take the branch on something known beforehand (shapes, step numbers), or estimate the part without it"
    )


def user_line(frame: FrameType | None) -> str:
    """`file:line, in function: source` of the innermost frame outside torch and Overspill."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return "the program"
    summary = traceback.extract_stack(frame, limit=1)[0]
    return f"{summary.filename}:{summary.lineno}, in {summary.name}: `{summary.line}`"


class VirtualGpu:
    """A context in which `cuda` exists and is written down.

    The host works for real (it reads files, shuffles and counts), except that parameters are always fake, and
    everything inside `recorder.fabricating()`. `capability` is the GPU's.
    """

    def __init__(self, *, capability: tuple[int, int] = (8, 0), memory_bytes: int = 1 << 40) -> None:
        self.recorder = Recorder()
        self._mode: FastFakeMode = FastFakeMode(finite(self.recorder.observe, lambda: self._mode))
        self._capability = capability
        self._cuda = CudaFunctions(self.recorder, capability, memory_bytes)
        self._stack = ExitStack()

    def __enter__(self) -> VirtualGpu:
        with ExitStack() as stack:
            stack.enter_context(retargeted(self._capability))
            stack.enter_context(patched(self._tensor_methods()))
            stack.enter_context(patched(self._cuda.replacements()))
            stack.enter_context(patched(distributed.replacements(self.recorder, self._mode)))
            stack.enter_context(distributed.answered_collectives())
            stack.enter_context(cuda_autocast())
            stack.enter_context(_hooks(self.recorder))
            stack.enter_context(_foreach_for_fakes())
            stack.enter_context(distributed.no_network())
            stack.enter_context(self._mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def _tensor_methods(self) -> list[tuple[Any, str, Any]]:
        """What replaces tensor methods: (owner, name, replacement)."""
        recorder, mode = self.recorder, self._mode
        to, cpu_device = torch.Tensor.to, FakeTensor.device
        item, tolist, numpy = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.numpy
        thread = get_ident()
        to_float, to_bool, to_text = torch.Tensor.__float__, torch.Tensor.__bool__, torch.Tensor.__format__

        def device(tensor: FakeTensor) -> torch.device:
            if not mode.computing and not tensor.fake_mode.in_kernel_invocation and recorder.on_device(tensor):
                return GPU
            return cpu_device.fget(tensor)  # type: ignore[misc, no-any-return]

        def is_cuda(tensor: torch.Tensor) -> bool:
            return not mode.computing and recorder.on_device(tensor)

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if mode.computing:
                return to(tensor, *args, **kwargs)
            target, dtype, memory_format, copy = _parse_to(tensor, args, kwargs)
            here = recorder.on_device(tensor)
            there = here if target is None else target.type == "cuda"
            if there and get_ident() != thread:  # fake tensors exist in the thread of the mode alone
                where = user_line(sys._getframe(1))
                raise UnsupportedError(f"{where} uses cuda in a thread of its own; an estimate sees the main thread")
            options = {"dtype": dtype or tensor.dtype, "copy": copy or here != there}
            if memory_format is not None:
                options["memory_format"] = memory_format
            if here == there:
                return to(tensor, **options)
            with recorder.placing(on_device=there):
                return to(tensor, CPU, **options)

        def cuda(tensor: torch.Tensor, device: Any = None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
            return moved(tensor, GPU)

        def cpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return moved(tensor, CPU)

        def value_of(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                if not isinstance(tensor, FakeTensor) or tensor.constant is not None:
                    return original(tensor, *args, **kwargs)
                if original is item and not tensor.dtype.is_complex:
                    return UnknownNumber()
                raise data_dependent()

            return read

        def decide(original: Callable[..., Any]) -> Callable[..., Any]:
            def read(tensor: torch.Tensor, *args: Any) -> Any:
                try:
                    return original(tensor, *args)
                except DataDependentOutputException:
                    if original is to_float:
                        return 1.0  # Python takes no other kind of float from here
                    if original is to_bool and (answer := goes_on(sys._getframe(1))) is not None:
                        return answer
                    raise data_dependent() from None

            return read

        def written(tensor: torch.Tensor, spec: str) -> str:
            unknown = isinstance(tensor, FakeTensor) and tensor.dim() == 0
            return "unknown" if unknown else to_text(tensor, spec)

        patches: list[tuple[Any, str, Any]] = [
            (FakeTensor, "device", property(device)),
            (FakeTensor, "is_cuda", property(is_cuda)),
            (torch.Tensor, "to", moved),
            (torch.Tensor, "cuda", cuda),
            (torch.Tensor, "cpu", cpu),
            (torch.Tensor, "pin_memory", lambda tensor, *_: tensor),
            (torch.Tensor, "is_pinned", lambda _tensor, *_: False),
            (torch.Tensor, "get_device", lambda tensor: 0 if recorder.on_device(tensor) else -1),
            (torch.Tensor, "record_stream", lambda _tensor, _stream: None),
            (torch.Tensor, "__format__", written),
            (torch.Tensor, "item", value_of(item)),
            (torch.Tensor, "tolist", value_of(tolist)),
            (torch.Tensor, "numpy", value_of(numpy)),
            (nn.Module, "_apply", _apply),
            (nn.init, "_no_grad_trunc_normal_", _trunc_normal(nn.init._no_grad_trunc_normal_)),
            (torch.amp.GradScaler, "_maybe_opt_step", _step),
            (torch.amp.GradScaler, "get_scale", initial_scale),
            (lbfgs, "float", lambda _: UnknownNumber()),
            (nn.Parameter, "__new__", staticmethod(self._new_parameter())),
        ]
        for name in ("__bool__", "__int__", "__index__", "__float__"):
            patches.append((torch.Tensor, name, decide(getattr(torch.Tensor, name))))
        return patches

    def _new_parameter(self) -> Callable[..., Any]:
        """`nn.Parameter(data)` with fake data: a model on the host then takes no memory, however large."""
        new, mode = nn.Parameter.__new__, self._mode

        def make(cls: type, data: torch.Tensor | None = None, requires_grad: bool = True) -> Any:
            if data is not None and not isinstance(data, FakeTensor) and not is_traceable_wrapper_subclass(data):
                data = mode.from_tensor(data.detach(), static_shapes=True)
            return new(cls, data, requires_grad)

        return make


def _step(_: Any, optimizer: torch.optim.Optimizer, _state: Any, *args: Any, **kwargs: Any) -> Any:
    """`GradScaler._maybe_opt_step` where no gradient is infinite."""
    return optimizer.step(*args, **kwargs)


def _trunc_normal(original: Callable[..., Any]) -> Callable[..., Any]:
    """torch's rejection sampling reads what it drew; fake weights are as good as any."""

    def fill(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else original(tensor, *args, **kwargs)

    return fill


def _parse_to(
    tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device | None, torch.dtype | None, torch.memory_format | None, bool]:
    """Device, dtype, memory format and copy of a call of `Tensor.to`."""
    kwargs = dict(kwargs)
    copy = bool(kwargs.pop("copy", False))
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], torch.Tensor):
        other, args = args[0], args[1:]
    if isinstance(other, torch.Tensor):
        return other.device, other.dtype, kwargs.get("memory_format"), copy
    if len(args) == 4 or (len(args) == 3 and isinstance(args[0], torch.dtype)):  # ... non_blocking, copy
        args, copy = args[:-1], bool(args[-1])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    return device, dtype, memory_format, copy


def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
    """`nn.Module._apply` as it is for plain tensors; torch's own swaps fake ones, which their weak references forbid."""
    if recurse:
        for child in self.children():
            child._apply(fn, recurse)
    for parameter in self._parameters.values():
        if parameter is None:
            continue
        with torch.no_grad():
            applied = fn(parameter)
            if applied is not parameter:
                parameter.data = applied
            if parameter.grad is not None:
                parameter.grad.data = fn(parameter.grad)
    for key, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[key] = fn(buffer)
    return self


@contextmanager
def patched(replacements: list[tuple[Any, str, Any]]) -> Iterator[None]:
    """The attributes are replaced inside and put back after, also the missing ones."""
    saved = [(owner, name, owner.__dict__.get(name, patched)) for owner, name, _ in replacements]
    try:
        for owner, name, replacement in replacements:
            setattr(owner, name, replacement)
        yield
    finally:
        for owner, name, original in reversed(saved):
            if original is patched:
                delattr(owner, name)
            else:
                setattr(owner, name, original)


@contextmanager
def _hooks(recorder: Recorder) -> Iterator[None]:
    """torch's global hooks tell the recorder of layers and optimizers."""

    def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        recorder.begin_update(parameters(optimizer))
        # What a closure runs is forward and backward, not the update that calls it.
        args = tuple(recorder.outside_update(a) if isinstance(a, FunctionType) else a for a in args)
        return args, {
            name: recorder.outside_update(value) if name == "closure" and value is not None else value
            for name, value in kwargs.items()
        }

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        recorder.end_update([value for state in optimizer.state.values() for value in state.values()])

    handles = [
        module_hooks.register_module_forward_pre_hook(lambda module, _: recorder.enter(module)),
        module_hooks.register_module_forward_hook(lambda *_: recorder.leave(), always_call=True),
        optimizer_hooks.register_optimizer_step_pre_hook(before),
        optimizer_hooks.register_optimizer_step_post_hook(after),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _foreach_for_fakes() -> Iterator[None]:
    """Optimizers take their foreach path for fake parameters, as they do for plain CUDA ones."""
    lists = [optimizer_hooks._foreach_supported_types, _foreach_utils._foreach_supported_types]
    added = [types for types in {id(types): types for types in lists}.values() if FakeTensor not in types]
    for types in added:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in added:
            types.remove(FakeTensor)
