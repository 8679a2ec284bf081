"""The live allocator: real memory from a pool.

Of a CUDA device, of the host, or of a simulated device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from overspill.core.errors import OutOfMemory, RequestError
from overspill.core.units import format_bytes
from overspill.placement.simulated_device import ADDRESS_SPACE_BYTES

try:
    from . import _live
except ImportError:  # the source tree without a build, or a system that is not Linux
    AVAILABLE = False
else:
    AVAILABLE = True

DEVICES = ("cuda", "host", "simulated")
POOLS = ("best-fit", "two-ended", "virtual")
ALIGNMENT_BYTES = 512
"""PyTorch's kernels rely on addresses that are multiples of this (kMinBlockSize of its caching allocator)."""
CHUNK_BYTES = 40 << 20
"""The window paper's size of a physical chunk (section 4)."""


@dataclass(frozen=True)
class Statistics:
    """Counts of an allocator since it was made.

    `deferred` frees had to wait for events. `allocated_bytes` is what live blocks asked for, `reserved_bytes` what the
    device gave. Of the main space of a pool with two ends, `least_gap_bytes` were never used in this step, and
    `overflows` blocks found no room there and got memory of their own. At most `peak_spilled_bytes` at once found no
    room at all and are of PyTorch's own memory (`let_spill`).
    """

    requests: int
    deferred: int
    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int
    peak_reserved_bytes: int
    main_bytes: int
    least_gap_bytes: int
    overflows: int
    peak_spilled_bytes: int


_SERVING: list[LiveAllocator] = []


def serving() -> LiveAllocator | None:
    """Our allocator that serves PyTorch's CUDA tensors, or None."""
    return _SERVING[-1] if _SERVING else None


class LiveAllocator:
    """Memory for blocks on streams, from a pool.

    The pool is `best-fit` (PyTorch's caching allocator), `two-ended` (Dymem, section 3.3: `main_bytes` of which movable
    blocks take the low end and temporary ones the high end) or `virtual` (window paper, section 4: physical chunks of
    `chunk_bytes` behind contiguous addresses).

    All methods may be called by any thread. On a device other than CUDA a stream is any number, and its work is done at
    once, or with `events_by_hand` when `complete` says so. Raises RequestError for a device or pool that is not there.
    """

    def __init__(
        self,
        device: str = "cuda",
        pool: str = "best-fit",
        *,
        index: int = 0,
        capacity_bytes: int | None = None,
        main_bytes: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        events_by_hand: bool = False,
    ) -> None:
        if device not in DEVICES:
            raise RequestError(f"there is no device {device!r} for live memory; there are {', '.join(DEVICES)}")
        if pool not in POOLS:
            raise RequestError(f"there is no pool {pool!r}; there are {', '.join(POOLS)}")
        if pool == "two-ended" and not main_bytes:
            raise RequestError("the two-ended pool needs the size of its main space: give main_bytes")
        if chunk_bytes <= 0 or (main_bytes or 0) < 0 or (capacity_bytes or 0) < 0:
            raise RequestError("sizes of a live allocator are numbers of bytes above 0")
        if not AVAILABLE:
            raise RequestError("the live allocator is native code for Linux, and this installation has none")
        # The pool itself is native code.
        self.device = device
        self.pool = pool
        self.capacity_bytes = capacity_bytes
        self._index = index
        try:
            self._core = _live.LiveCore(
                device, pool, index, capacity_bytes, main_bytes or 0, chunk_bytes, events_by_hand
            )
        except RuntimeError as error:
            raise RequestError(f"no memory of device {device!r}: {error}; the device 'host' works anywhere") from None

    def allocate(self, nbytes: int, stream: int = 0) -> int:
        """The address of `nbytes` for `stream` (0 for no bytes). Raises OutOfMemory when there is no room."""
        if nbytes < 0:
            raise RequestError(f"a block cannot have {nbytes} bytes")
        address = self._core.allocate(nbytes, stream) if nbytes <= ADDRESS_SPACE_BYTES else None
        if address is None:
            raise self._out_of_memory(nbytes)
        return address

    def free(self, address: int) -> None:
        """Free the block at `address`. Raises RequestError when no live block begins there."""
        if not self._core.free(address):
            raise RequestError(f"no live block begins at address {address:#x}")

    def use(self, address: int, stream: int) -> None:
        """Note that `stream` uses the block at `address` too (`Tensor.record_stream`).

        Once freed, it is reused only when the work given to the stream by then is done. Raises RequestError when no
        block is live there.
        """
        if not self._core.use(address, stream):
            raise RequestError(f"no live block begins at address {address:#x}")

    def begin_step(self) -> None:
        """Begin a step; what the main space of a two-ended pool never used is counted anew."""
        self._core.begin_step()

    def group_untold(self, group: int) -> None:
        """Set the group of blocks without a hint (`groups.py`)."""
        self._core.group_untold(group)

    def resize(self, main_bytes: int, *, grows: bool) -> bool:
        """Resize the main space of a two-ended pool; whether it was empty.

        It must be empty for this. With `grows`, in any case, overflow gets its own memory from now on.
        """
        return self._core.resize(main_bytes, grows)

    def let_spill(self, spills: bool) -> None:
        """Let CPU tensors without room come from PyTorch's allocator, or fail."""
        self._core.let_spill(spills)

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Context in which this thread's new CPU tensors get their memory here.

        They keep it as long as they live.
        """
        self._core.enter()
        try:
            yield
        finally:
            self._core.leave()

    def limit(self, capacity_bytes: int) -> None:
        """Limit the device memory taken from now on.

        Anything above is given back as far as no block uses it.
        """
        self.capacity_bytes = capacity_bytes
        self._core.limit(capacity_bytes)

    def trim(self) -> None:
        """Give unused memory back to the device.

        Waits until all freed blocks are out of use.
        """
        self._core.trim()

    def statistics(self) -> Statistics:
        """The counts so far."""
        return Statistics(**self._core.statistics())

    def complete(self, stream: int) -> None:
        """Complete all work of `stream`, on a device with `events_by_hand`."""
        self._core.complete(stream)

    def resident_bytes(self) -> int:
        """Resident bytes of our host memory. Raises RequestError on another device."""
        resident = self._core.resident_bytes()
        if resident is None:
            raise RequestError("resident bytes are known of the device 'host' only")
        return resident

    def as_pluggable(self) -> Any:
        """A `torch.cuda.memory.CUDAPluggableAllocator` that allocates here, for good.

        As the process's allocator (`torch.cuda.memory.change_current_allocator`, before the first CUDA tensor) it sees
        every request. In a `torch.cuda.MemPool(allocator.allocator())` PyTorch's caching allocator stands before it and
        asks for whole segments only.

        Raises RequestError without CUDA, and where another allocator serves the device already.
        """
        import torch  # noqa: PLC0415  # host and simulated devices do without

        if self.device != "cuda":
            raise RequestError(f"PyTorch needs memory of device 'cuda', and this is {self.device!r}")
        if not torch.cuda.is_available():
            raise RequestError("PyTorch has no CUDA device here")
        # Install the native core, and give PyTorch its functions.
        if not self._core.install(self._index):
            raise RequestError(f"CUDA device {self._index} is served by another live allocator for good")
        pluggable = torch.cuda.memory.CUDAPluggableAllocator(_live.__file__, "overspill_malloc", "overspill_free")
        library = ctypes.CDLL(_live.__file__)
        hooks = pluggable.allocator()
        hooks.set_record_stream_fn(_pointer(library.overspill_record_stream))
        hooks.set_reset_fn(_pointer(library.overspill_empty_cache))
        hooks.set_begin_allocate_to_pool(_pointer(library.overspill_begin_pool))
        return pluggable

    def serve_pytorch(self) -> None:
        """Be PyTorch's CUDA allocator from now on and for good.

        Every CUDA tensor's memory then comes from here. PyTorch has no statistics of its own then
        (`torch.cuda.memory_allocated` raises; `statistics` has them) and cannot let cuDNN try engines
        (`torch.backends.cudnn.benchmark`). Raises RequestError as `as_pluggable` does, and when PyTorch has used CUDA
        already.
        """
        import torch  # noqa: PLC0415

        too_late = "PyTorch keeps the CUDA allocator that it has begun to use; be its allocator before it uses the GPU"
        if torch.cuda.is_initialized():
            raise RequestError(too_late)
        check_benchmark()
        pluggable = self.as_pluggable()
        try:
            torch.cuda.memory.change_current_allocator(pluggable)
        except RuntimeError as error:  # another one than PyTorch's own
            raise RequestError(f"{too_late} ({error})") from None
        _SERVING.append(self)

    def _out_of_memory(self, nbytes: int) -> OutOfMemory:
        reserved = self.statistics().reserved_bytes
        return OutOfMemory(
            f"the live allocator finds no room for {format_bytes(nbytes)} on device {self.device!r}: it holds"
            f" {format_bytes(reserved)}",
            requested_bytes=nbytes,
            reserved_bytes=reserved,
            capacity_bytes=self.capacity_bytes,
        )


def check_benchmark() -> None:
    """Raise RequestError if cuDNN is to benchmark engines.

    For that it asks PyTorch's own allocator how much memory is free.
    """
    import torch  # noqa: PLC0415

    if torch.backends.cudnn.benchmark:
        raise RequestError(
            "torch.backends.cudnn.benchmark does not work with the live allocator (placement='planned'); set it to False"
        )


def _pointer(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
