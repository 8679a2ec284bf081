"""An allocator for any CUDA job: planned addresses, chunks, or two ends (native/live/, native/allocators/).

PyTorch asks it for every block, as its pluggable allocator. Rules, streams and the driver are native; this module puts
it in its place, says what does not work with it, and translates its figures.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import sys
import weakref
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.placement.allocators.planned import PlannedCounts

PLANNED = "planned"
LIVE = (PLANNED, "chunked", "gtbm")
"""Those that a running job can have, by the names that they have in simulation."""
CHECK = "OVERSPILL_ALLOCATOR_CHECK"
"""Set to 1, every block is checked by books of their own; the process ends where one is wrong."""
WITHOUT = (
    "these do not work with it, and PyTorch raises an error where they are asked for: torch.cuda.MemPool (vLLM's"
    ' sleep mode), torch.compile(mode="reduce-overhead"), torch.cuda.memory._snapshot and _record_memory_history,'
    " sharing CUDA tensors between processes, torch.backends.cudnn.benchmark."
    " PYTORCH_CUDA_ALLOC_CONF has no influence"
)
_LOG = logging.getLogger("overspill")
_MOST_FIGURES = 64


class AllocatorFigures(NamedTuple):
    """What the allocator of one GPU did so far; bytes are now and at their peak."""

    requested: int
    requested_peak: int
    allocated: int
    allocated_peak: int
    reserved: int
    reserved_peak: int
    blocks: int
    """Live blocks."""
    taken: int
    given: int
    waiting: int
    """Blocks that were freed, and that other streams may still use."""
    retries: int
    """How often idle pages were given back to make room."""
    out_of_memory: int
    region: int
    """Bytes that plans lie in."""
    virtual: int
    """0 where the driver has no virtual memory: blocks are cached by PyTorch's rules then."""
    counts: PlannedCounts
    """Of `planned`; zeros of the others."""


class LiveAllocator:
    """The allocator in force."""

    def __init__(self, library: Path, name: str = PLANNED, *, check: bool = False) -> None:
        """Load `library` for the allocator `name`; PyTorch does not use it yet."""
        self.name = name
        self.path = library
        self.virtual = False
        self.library = ctypes.CDLL(str(library))
        for function in ("take", "pool_function"):
            getattr(self.library, f"overspill_{function}").restype = ctypes.c_void_p
        self.library.overspill_take.argtypes = (ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        self.library.overspill_give.argtypes = (ctypes.c_void_p, ctypes.c_int)
        self.library.overspill_set_fraction.argtypes = (ctypes.c_double, ctypes.c_int)
        self.library.overspill_error.restype = ctypes.c_char_p
        self.library.overspill_configure(name.encode(), int(check))

    def has_virtual_memory(self) -> bool:
        """Return whether the driver has what these allocators take. Raises UnsupportedError if there is none."""
        found = self.library.overspill_has_virtual_memory(0)  # GPUs of one machine are alike; none is touched
        if found < 0:
            raise UnsupportedError(f"the allocator cannot be used: {self.error()}")
        return bool(found)

    def functions(self) -> dict[str, int]:
        """Return the addresses that PyTorch is given besides those of malloc and free."""
        names = ("record_stream", "empty_cache", "base_allocation", "set_fraction")
        found = {name: _address(getattr(self.library, f"overspill_{name}")) for name in names}
        pools = ("begin_capture", "end_capture", "release_pool")
        return found | {name: self.library.overspill_pool_function(which) for which, name in enumerate(pools)}

    def step(self) -> None:
        """End a step here, on all GPUs."""
        self.library.overspill_step()

    def wait(self) -> None:
        """Wait for the plans that are being solved."""
        self.library.overspill_wait()

    def figures(self, device: int = 0) -> AllocatorFigures:
        """Return what happened on `device` so far."""
        values = (ctypes.c_int64 * _MOST_FIGURES)()
        found = values[: self.library.overspill_figures(device, values)]
        own = len(AllocatorFigures._fields) - 1
        return AllocatorFigures._make([*found[:own], PlannedCounts._make(found[own:])])

    def reset_peaks(self, device: int) -> None:
        """Let peaks begin at what is there now."""
        self.library.overspill_reset_peaks(device)

    def error(self) -> str:
        """Return what went wrong last in this thread."""
        return self.library.overspill_error().decode()

    def stats(self, device: int) -> dict[str, Any]:
        """Return the figures of `device` in the form of PyTorch's own allocator, which has more of them."""
        f = self.figures(device)
        live = _stat(f.allocated, f.allocated_peak)
        return {
            "allocated_bytes": live,
            "active_bytes": live,
            "requested_bytes": _stat(f.requested, f.requested_peak),
            "reserved_bytes": _stat(f.reserved, f.reserved_peak),
            "allocation": _stat(f.blocks, f.blocks, f.taken, f.given),
            "active": _stat(f.blocks + f.waiting, f.blocks + f.waiting, f.taken, f.given),
            **{name: _stat(0, 0) for name in ("segment", "inactive_split", "inactive_split_bytes")},
            **{name: _stat(0, 0)["all"] for name in ("oversize_allocations", "oversize_segments")},
            "num_alloc_retries": f.retries,
            "num_ooms": f.out_of_memory,
            **dict.fromkeys(("max_split_size", "num_sync_all_streams", "num_device_alloc", "num_device_free"), 0),
        }


def _stat(now: int, peak: int, taken: int = 0, given: int = 0) -> dict[str, dict[str, int]]:
    """Return one of PyTorch's statistics; pools by size are not told apart."""
    none = {"current": 0, "peak": 0, "allocated": 0, "freed": 0}
    return {
        "all": {"current": now, "peak": peak, "allocated": taken, "freed": given},
        "small_pool": none,
        "large_pool": none,
    }


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def library_path() -> Path:
    """Return where the native allocator is: beside the other native modules. Raises UnsupportedError."""
    from .transfer import _copies  # noqa: PLC0415 - for its place alone

    path = Path(_copies.__file__).resolve().parent / "liboverspill_allocator.so"
    if not path.exists():
        raise UnsupportedError(
            f"this build of Overspill has no allocator: there is no {path}; install it anew on Linux"
        )
    return path


_in_force: LiveAllocator | None = None


def check_live(name: str) -> None:
    """Raise RequestError unless a running job can have the allocator `name`."""
    if name not in LIVE:
        raise RequestError(f"there is no allocator {name!r} for a running job; there are {', '.join(LIVE)}")


def allocator(name: str = PLANNED) -> LiveAllocator:
    """Take all CUDA memory of this process from the allocator `name`.

    - "planned": steps that repeat get planned addresses from the third on.
    - "chunked": any 2 MiB of memory serve any request; no fragmentation, and many calls of the driver.
    - "gtbm": what a step keeps long and what it keeps briefly, from two ends of one pool.

    It has to be called before CUDA is first used. Call `overspill.step()` at the end of each step where steps differ
    much. Raises RequestError for another name, UnsupportedError where PyTorch has no CUDA, or CUDA is in use.
    """
    global _in_force  # noqa: PLW0603 - a process has one allocator
    check_live(name)
    if _in_force is not None:
        if name != _in_force.name:
            raise UnsupportedError(f"the allocator {_in_force.name!r} is in force, and a process has one")
        return _in_force
    import torch  # noqa: PLC0415
    from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: PLC0415

    from overspill.pytorch import pluggable  # noqa: PLC0415

    if not torch.backends.cuda.is_built() or torch.version.hip is not None:
        raise UnsupportedError(f"overspill.allocator needs PyTorch for CUDA, not {torch.__version__}")
    if pluggable.is_started():
        raise UnsupportedError(
            "CUDA is in use, and its allocator cannot be changed any more: call overspill.allocator before the first"
            " tensor on CUDA, or start the job by `overspill run`"
        )
    found = LiveAllocator(library_path(), name, check=os.environ.get(CHECK) == "1")
    if not torch.cuda.is_available():
        raise UnsupportedError("overspill.allocator needs a GPU, and PyTorch finds none")
    virtual = found.has_virtual_memory()
    pluggable.change_allocator(found.path, found.functions())
    pluggable.replace_statistics(found.stats, found.reset_peaks)
    how = "" if virtual else " and caches by PyTorch's rules, for the driver has no virtual memory management"
    _LOG.warning("Overspill's allocator %r is in force%s; %s", name, how, WITHOUT)
    found.virtual = virtual
    _in_force = found
    register_optimizer_step_post_hook(_Steps().stepped)
    return found


def in_force() -> str | None:
    """Return the name of the allocator that has all CUDA memory of this process; None if that is cached as usual."""
    return _in_force.name if _in_force is not None and _in_force.virtual else None


class _Steps:
    """Ends a step of the job at that of an optimizer.

    Of several it is the first that stepped, so that a step is a whole round of all. If another steps twice in between,
    it is that one from then on.
    """

    def __init__(self) -> None:
        self._chosen: weakref.ref[Any] | None = None
        self._since: weakref.WeakSet[Any] = weakref.WeakSet()

    def stepped(self, optimizer: Any, *_: object) -> None:
        """Take note of a step of `optimizer`."""
        chosen = None if self._chosen is None else self._chosen()
        if chosen is not None and chosen is not optimizer and optimizer not in self._since:
            self._since.add(optimizer)
            return
        self._chosen = weakref.ref(optimizer)
        self._since.clear()
        step()


def step() -> None:
    """End a step of the job here, for the allocator in force; without one it does nothing.

    Steps of optimizers and of `overspill.train_step` end one too.
    """
    if _in_force is not None:
        _in_force.step()


def run_script(name: str, script: str, arguments: Sequence[str]) -> None:
    """Run a file, or a module by its dotted name, as the main program with the allocator `name`."""
    try:
        allocator(name)
    except OverspillError as error:
        sys.exit(f"error: {error}")
    sys.argv = [script, *arguments]
    if Path(script).exists():
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
    else:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
