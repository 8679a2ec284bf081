"""Offloaded bytes in page-locked host memory, for CUDA."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque

import torch
from torch import Tensor

from overspill.pytorch.storages import storage_over
from overspill.runtime.accelerator import DeviceStream, PageLock, raw_streams

from . import host_memory
from ._copies import can_copy
from .host_store import HostStore
from .lanes import CopyLane, HeldSlot, Lane, Slot, StreamLane, bytes_of


class PinnedStore(HostStore):
    """Page-locked host memory for CUDA, with copies that do not block.

    The arena is ordinary memory locked for the device. The pinned allocator of torch would round each block up to a
    power of two. `pages` is a PageLock, or a stand-in in tests.
    """

    name = "pinned"
    device_type = "cuda"
    _advice = "a larger budget offloads less; `ulimit -l` may forbid to lock so much"

    def __init__(self, pages: PageLock | None = None) -> None:
        super().__init__()
        self._pages = pages or PageLock()
        self._addresses: list[int] = []
        self._streams: list[DeviceStream] = []
        self._held = HeldPages(self._pages)
        self._left: deque[HeldSlot] = deque()
        self._end = weakref.finalize(self, _unlock, self._chunks, self._held, self._streams, os.getpid())

    def _allocate_chunk(self, nbytes: int) -> Tensor:
        chunk = super()._allocate_chunk(nbytes)
        if (status := self._pages.lock(chunk)) != 0:
            raise RuntimeError(f"host memory could not be locked: error {status}")
        self._addresses.append(chunk.data_ptr())
        return chunk

    def lanes(self, device: torch.device) -> tuple[Lane, Lane]:
        """Return two streams of `device`, one each way."""
        lanes: tuple[CopyLane | StreamLane, CopyLane | StreamLane]
        if (streams := raw_streams(device)) is not None and can_copy(streams.path, streams.prefix):
            lanes = CopyLane(streams, self._address, outward=True), CopyLane(streams, self._address, outward=False)
        else:
            lanes = StreamLane(device, self.write), StreamLane(device, self.read)
        self._streams += [lane.stream for lane in lanes]
        return lanes

    def hold(self, tensor: Tensor) -> Slot:
        """Lock the pages of `tensor` where they are, or copy it if the system refuses."""
        if tensor.nbytes and self._held.lock(tensor):
            return HeldSlot.of(tensor)
        slot = self.allocate(tensor.nbytes)
        self._part(slot, tensor.nbytes).copy_(HeldSlot.of(tensor).memory)
        return slot

    def release(self, slot: Slot) -> None:
        """Free `slot`; a tensor that is held stays, because a copy of it may be under way."""
        if isinstance(slot, HeldSlot):
            self._left.append(slot)
        super().release(slot)

    def let_go(self) -> None:
        """Wait for the copies of held tensors that have left, and free these."""
        if self._left:
            for stream in self._streams:
                stream.synchronize()
            while self._left:
                self._held.unlock(self._left.popleft().tensor)

    def _address(self, slot: Slot) -> int:
        if isinstance(slot, HeldSlot):
            return slot.memory.data_ptr()
        return self._addresses[slot.chunk] + slot.offset

    def write(self, slot: Slot, source: Tensor) -> None:
        """Enqueue the copy to the host on the current stream."""
        self._part(slot, source.numel()).copy_(source, non_blocking=True)

    def read(self, slot: Slot, target: Tensor) -> None:
        """Enqueue the copy to the device on the current stream."""
        target.copy_(self._part(slot, target.numel()), non_blocking=True)

    def shown(self, slot: Slot, nbytes: int, keep: object) -> Tensor:
        """Wait for copies under way, and return the slot's part of the arena."""
        for stream in self._streams:
            stream.synchronize()
        return super().shown(slot, nbytes, keep)

    def _part(self, slot: Slot, nbytes: int) -> Tensor:
        if isinstance(slot, HeldSlot):
            return slot.memory
        return self._chunks[slot.chunk][slot.offset : slot.offset + nbytes]

    def close(self) -> None:
        """Unlock and free the arena."""
        self._left.clear()
        self._end()


class HeldPages:
    """Page locks of tensors that are held where they are.

    Tensors of one storage are locked together, and so are all of a file that is mapped: their pages overlap.
    """

    def __init__(self, pages: PageLock) -> None:
        self.pages = pages
        self._locked: dict[int, list[Tensor]] = {}
        """By the first address that is locked: that memory, and the tensors in it."""

    def lock(self, tensor: Tensor) -> bool:
        """Lock the pages of `tensor`, and of what they are locked with; return whether they are."""
        memory = self._memory_of(tensor)
        if (found := self._locked.get(memory.data_ptr())) is None:
            # Memory that PyTorch did not allocate may be a file, whose pages would be copied to be written.
            if self.pages.lock(memory, read_only=not tensor.untyped_storage().resizable()) != 0:
                return False
            found = self._locked[memory.data_ptr()] = [memory]
        found.append(tensor)
        return True

    def unlock(self, tensor: Tensor) -> None:
        """Unlock the pages of `tensor` if no other tensor that is held has them."""
        memory = self._memory_of(tensor)
        if (found := self._locked.get(memory.data_ptr())) is not None:
            found[1:] = [other for other in found[1:] if other is not tensor]
            if len(found) == 1:
                self.pages.unlock(self._locked.pop(memory.data_ptr())[0])

    def _memory_of(self, tensor: Tensor) -> Tensor:
        """Return the memory that is locked with `tensor`: its storage, or the file that is mapped there."""
        storage = tensor.untyped_storage()
        if storage.resizable():
            return bytes_of(storage)
        known = (memory for memory, *_ in self._locked.values())
        at = storage.data_ptr()
        if (found := next((m for m in known if 0 <= at - m.data_ptr() < m.nbytes), None)) is not None:
            return found
        if (span := host_memory.mapped_file(at)) is None:
            return bytes_of(storage)
        return bytes_of(storage_over(span[0], storage.device, span[1] - span[0]))

    def clear(self) -> None:
        """Unlock all."""
        for memory, *_ in self._locked.values():
            self.pages.unlock(memory)
        self._locked.clear()


def _unlock(chunks: list[Tensor], held: HeldPages, streams: list[DeviceStream], process: int) -> None:
    """Unlock and free the arena of a pinned store, and the tensors that it holds."""
    try:
        if process == os.getpid():  # a forked child has no device
            with contextlib.suppress(RuntimeError):  # of a device that has failed: nothing is under way on it any more
                for stream in streams:  # of an engine that was dropped, copies may be under way
                    stream.synchronize()
            for chunk in chunks:
                held.pages.unlock(chunk)
            held.clear()
    finally:
        chunks.clear()
        streams.clear()
