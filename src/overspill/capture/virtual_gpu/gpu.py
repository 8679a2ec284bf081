"""`VirtualGpu`: a context in which programs run on `cuda`, on fake tensors.

Tensors on the device are fake CPU tensors that the recorder knows; to the program they are on `cuda:0`. The value of a
device tensor, which is never computed, is an `UnknownNumber`: it can be printed and averaged, but not compared.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from types import FunctionType
from typing import Any, Self

import torch
from torch.nn.modules import module as module_hooks

from overspill.capture.fake_cuda.autocast import cuda_autocast
from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.capture.fake_cuda.retarget import retargeted
from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.pytorch.dynamo_stand_in import no_compiler
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.optimizers import SCALED_STEP, foreach_types
from overspill.pytorch.patching import Patches, patched

from . import distributed
from .cuda_module import CudaFunctions
from .files import file_patches
from .tensor_methods import TensorMethods
from .torch_patches import factories, torch_patches
from .triton_kernels import no_launches
from .values.assumptions import finite, initial_scale
from .values.invented import Invented, answering
from .values.methods import value_patches
from .values.real_values import touches_unknown
from .values.unknown import UnknownNumber

# torch.optim deletes the names of its own modules.
optimizer_hooks, lbfgs = sys.modules["torch.optim.optimizer"], sys.modules["torch.optim.lbfgs"]
_ONE_AT_A_TIME = Lock()  # torch is patched for the whole process


class VirtualGpu:
    """A context in which `cuda` exists and its memory use is recorded.

    The host works for real (it reads files, shuffles and counts). Parameters are always fake, and so is everything
    inside `recorder.fabricating()`. `capability` is the GPU's compute capability. With `invented`, a program that reads
    values gets placeholder values; without it, it ends with an error where it branches on them. With `saves`,
    `torch.save` writes files of tensors without values too. `lines`: as in Recorder.

    torch is patched for the whole process, so only one can be active at a time. Its program runs in one thread; other
    threads stay on the host meanwhile. Raises RequestError on entry if another one is active.
    """

    def __init__(
        self, *, capability: tuple[int, int] = (8, 0), memory_bytes: int = 1 << 40, invented: Invented | None = None,
        saves: bool = False, lines: bool = True,
    ) -> None:  # fmt: skip
        self.recorder, self._invented, self._saves = Recorder(lines=lines), invented, saves
        observe = answering(self.recorder.observe, self._fakes, invented)
        with no_compiler():
            self._mode: FastFakeMode = FastFakeMode(finite(observe, self._fakes), self._is_of_host)
        self._capability = capability
        self._cuda = CudaFunctions(self.recorder, capability, memory_bytes)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        if not _ONE_AT_A_TIME.acquire(blocking=False):
            raise RequestError("a recording is under way in this process; torch is replaced for one at a time")
        with ExitStack() as stack:
            stack.callback(_ONE_AT_A_TIME.release)
            # The host: torch's compiler and the garbage collector.
            stack.enter_context(no_compiler())
            stack.enter_context(_collecting_only_what_is_new())
            # Ops, tensors, files and values.
            stack.enter_context(retargeted(self._capability))
            stack.enter_context(factories())
            stack.enter_context(patched(TensorMethods(self.recorder, self._mode).replacements()))
            stack.enter_context(patched(torch_patches(self.recorder)))
            stack.enter_context(
                patched([*file_patches(saves=self._saves), *value_patches(self._invented), *_scalers(self._invented)])
            )
            # Devices, process groups, autocast and hooks.
            stack.enter_context(patched(self._cuda.replacements()))
            stack.enter_context(patched(distributed.replacements(self.recorder, self._mode, self._replace)))
            stack.enter_context(distributed.answered_ops())
            stack.enter_context(cuda_autocast())
            stack.enter_context(_hooks(self.recorder))
            stack.enter_context(_foreach_for_fakes())
            stack.enter_context(no_launches(self._replace))
            stack.enter_context(distributed.no_network())
            stack.enter_context(self._mode)
            # All is in place: undone at the end only.
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def _fakes(self) -> FastFakeMode:
        return self._mode

    def _is_of_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return self.recorder.is_of_host(func, args, kwargs) and not touches_unknown(func, args, kwargs)

    def _replace(self, patches: Patches) -> None:
        """Add patches that the program needs from now on, until the end of the context."""
        self._stack.enter_context(patched(patches))


def _scalers(invented: Invented | None) -> Patches:
    """Return patches for code that reads values of gradients and losses."""
    return [
        (*SCALED_STEP, _step),
        (torch.amp.GradScaler, "get_scale", initial_scale),
        (lbfgs, "float", lambda _: UnknownNumber(invented=invented)),
    ]


def _step(_: Any, optimizer: torch.optim.Optimizer, _state: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `GradScaler._maybe_opt_step` as if no gradient is infinite."""
    return optimizer.step(*args, **kwargs)


@contextmanager
def _hooks(recorder: Recorder) -> Iterator[None]:
    """Report layers and optimizer steps to the recorder by torch's hooks, inside the block."""

    def parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        recorder.begin_update(parameters(optimizer))
        # A closure runs forward and backward, which are not part of the update that calls it.
        args = tuple(recorder.outside_update(a) if isinstance(a, FunctionType) else a for a in args)
        return args, {
            name: recorder.outside_update(value) if name == "closure" and value is not None else value
            for name, value in kwargs.items()
        }

    def after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        recorder.end_update([value for state in optimizer.state.values() for value in state.values()])

    # Global hooks: all modules and all optimizers.
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
def _collecting_only_what_is_new() -> Iterator[None]:
    """Make the garbage collector skip everything that was imported before, inside the block."""
    if gc.get_freeze_count():  # the program does so itself
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _foreach_for_fakes() -> Iterator[None]:
    """Make optimizers take their foreach path for fake parameters, as for plain CUDA ones, inside the block."""
    added = [types for types in foreach_types() if FakeTensor not in types]
    for types in added:
        types.append(FakeTensor)
    try:
        yield
    finally:
        for types in added:
            types.remove(FakeTensor)
