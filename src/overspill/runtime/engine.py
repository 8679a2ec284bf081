"""The transfer engine: carries out Offload, AwaitOffload, Prefetch and AwaitPrefetch for one store."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .stores import Slot, Store
from .streams import Lane, StreamLane, ThreadLane, Ticket


@dataclass
class _Stored:
    """One offloaded storage: where its bytes are, and how the tensor that was seen lies in it."""

    slot: Slot
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    leaving: Ticket | None
    readers: int = 0
    dropped: bool = False


class TransferEngine:
    """Moves storages between the device and `store` on two lanes, one each way.

    An offloaded tensor becomes a *handle*: an int64 tensor of one element, an id in a table. Autograd can save it, and
    when autograd drops it (backward done, or never run) the finalizer of its storage gives the slot back.
    """

    def __init__(self, store: Store, outward: Lane, inward: Lane) -> None:
        self.store = store
        self._outward = outward
        self._inward = inward
        self._table: dict[int, _Stored] = {}
        self._arriving: dict[int, tuple[Ticket, _Stored]] = {}
        self._ids = itertools.count(1)
        self.offloaded_bytes = 0
        self.prefetched_bytes = 0

    @property
    def stored_count(self) -> int:
        """How many storages the table holds now."""
        return len(self._table)

    def offload(self, source: Tensor) -> Tensor:
        """Start copying the whole storage of `source` to the store; its handle."""
        nbytes = source.untyped_storage().nbytes()
        slot = self.store.allocate(nbytes)
        key = next(self._ids)
        try:
            ticket = self._outward.submit(
                lambda bytes_: self.store.write(slot, bytes_), _bytes_of(source.untyped_storage())
            )
        except BaseException:
            self.store.release(slot)
            raise
        self.offloaded_bytes += nbytes
        return self._handle(
            key,
            _Stored(
                slot, nbytes, source.size(), source.stride(), source.storage_offset(), source.dtype, source.device, ticket
            ),
        )  # fmt: skip

    def blank(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The handle of a dense tensor whose bytes nobody has set yet: room in the store, and no copy."""
        nbytes = size.numel() * dtype.itemsize
        return self._handle(
            next(self._ids), _Stored(self.store.allocate(nbytes), nbytes, size, stride, 0, dtype, device, None)
        )

    def _handle(self, key: int, stored: _Stored) -> Tensor:
        self._table[key] = stored
        handle = torch.tensor([key], dtype=torch.int64)
        weakref.finalize(handle.untyped_storage(), _release, weakref.ref(self), key)
        return handle

    def await_offload(self, handle: Tensor) -> None:
        """Wait until the copy of `handle` is done. Raises StoreError if it failed."""
        stored = self._table[int(handle)]
        # Forgotten first: a ticket that failed holds the error, whose traceback would hold the handle and so the slot.
        leaving, stored.leaving = stored.leaving, None
        if leaving is not None:
            leaving.wait()

    def prefetch(self, handle: Tensor) -> Tensor:
        """Start bringing `handle` back; the tensor, with the strides it had, not to be read before `await_prefetch`."""
        stored = self._table[int(handle)]
        storage = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.device).untyped_storage()
        tensor = torch.empty(0, dtype=stored.dtype, device=stored.device)
        tensor.set_(storage, stored.offset, stored.size, stored.stride)
        slot = stored.slot
        ticket = self._inward.submit(lambda bytes_: self.store.read(slot, bytes_), _bytes_of(storage))
        stored.readers += 1
        self._arriving[storage._cdata] = (ticket, stored)
        self.prefetched_bytes += stored.nbytes
        return tensor

    def await_prefetch(self, tensor: Tensor) -> None:
        """Wait until `tensor` is filled. Raises StoreError if that failed."""
        ticket, stored = self._arriving.pop(tensor.untyped_storage()._cdata)
        try:
            ticket.wait()
        finally:
            stored.readers -= 1
            if stored.dropped and not stored.readers:
                self.store.release(stored.slot)

    def close(self) -> None:
        """Finish what is under way and give the store back."""
        self._outward.close()
        self._inward.close()
        self._arriving.clear()
        self._table.clear()
        self.store.close()

    def _forget(self, key: int) -> None:
        stored = self._table.pop(key, None)
        if stored is None:
            return
        stored.dropped = True
        if not stored.readers:  # else the slot is still being read: whoever awaits that gives it back
            self.store.release(stored.slot)


def make_engine(store: Store, device: torch.device) -> TransferEngine:
    """The engine for tensors on `device`: threads for the CPU, two streams for CUDA."""
    if device.type == "cuda":
        return TransferEngine(store, StreamLane(device), StreamLane(device))
    return TransferEngine(store, ThreadLane("offload"), ThreadLane("prefetch"))


def _release(engine: weakref.ref[TransferEngine], key: int) -> None:
    if (alive := engine()) is not None:
        alive._forget(key)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a one-dimensional uint8 tensor, which keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
