"""The transfer engine: carries out Offload, AwaitOffload, Prefetch and AwaitPrefetch for one store."""

from __future__ import annotations

import itertools
import weakref
import zlib
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from overspill.core.errors import RequestError, StoreError
from overspill.core.units import format_bytes

from .lanes import Lane, Ticket
from .stores import Slot, Store, memory_of


@dataclass
class _Stored:
    """One offloaded storage: where its bytes are, and how the tensor that was seen lies in it.

    `leaving` is the copy to the store while it is under way; `written`: it is done. `checksum` is of the bytes written.
    """

    slot: Slot
    nbytes: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    leaving: Ticket | None = None
    written: bool = False
    checksum: int | None = None
    readers: int = 0
    dropped: bool = False


class TransferEngine:
    """Moves storages between the device and `store` on two lanes, one each way.

    An offloaded tensor becomes a *handle*: an int64 tensor of one element, an id in a table. Autograd can save it, and
    when autograd drops it (backward done, or never run) the finalizer of its storage gives the slot back.

    A transfer that failed can be awaited again, and is then started anew: nothing is lost before that.
    With `checksum` the CRC-32 of all bytes is taken before they are written, and compared when they have been read.
    """

    def __init__(self, store: Store, outward: Lane, inward: Lane, *, checksum: bool = False) -> None:
        self.store = store
        self._checks = checksum
        self._outward = outward
        self._inward = inward
        self._table: dict[int, _Stored] = {}
        self._arriving: dict[int, tuple[Ticket | None, _Stored]] = {}
        self._ids = itertools.count(1)
        self.offloaded_bytes = 0
        self.prefetched_bytes = 0

    @property
    def stored_count(self) -> int:
        """How many storages the table holds now."""
        return len(self._table)

    def offload(self, source: Tensor) -> Tensor:
        """Start copying the whole storage of `source` to the store; its handle. Raises StoreError."""
        nbytes = source.untyped_storage().nbytes()
        stored = _Stored(
            self.store.allocate(nbytes), nbytes,
            source.size(), source.stride(), source.storage_offset(), source.dtype, source.device,
        )  # fmt: skip
        try:
            stored.leaving = self._write(stored, source)
        except BaseException:
            self.store.release(stored.slot)
            raise
        self.offloaded_bytes += nbytes
        return self._handle(stored)

    def blank(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The handle of a dense tensor whose bytes nobody has set yet: room in the store, and no copy."""
        nbytes = size.numel() * dtype.itemsize
        slot = self.store.allocate(nbytes)
        return self._handle(_Stored(slot, nbytes, size, stride, 0, dtype, device, written=True))

    def _handle(self, stored: _Stored) -> Tensor:
        key = next(self._ids)
        self._table[key] = stored
        handle = torch.tensor([key], dtype=torch.int64, device="cpu")
        weakref.finalize(handle.untyped_storage(), _release, weakref.ref(self), key)
        return handle

    def await_offload(self, handle: Tensor, source: Tensor | None = None) -> None:
        """Wait until the copy of `handle` is done. Raises StoreError if it failed.

        After that, it can be awaited again with its `source`, from which it is then copied anew.
        """
        stored = self._table[int(handle)]
        # Forgotten first: a ticket that failed holds the error, whose traceback would hold the handle and so the slot.
        leaving, stored.leaving = stored.leaving, None
        if leaving is None and not stored.written:
            assert source is not None
            leaving = self._write(stored, source)
        if leaving is not None:
            leaving.wait()
        stored.written = True

    def prefetch(self, handle: Tensor, into: torch.UntypedStorage | None = None) -> Tensor:
        """Start bringing `handle` back; the tensor, with the strides it had, not to be read before `await_prefetch`.

        Its bytes come to new memory, or to the storage `into`, which has as many.
        """
        stored = self._table[int(handle)]
        storage = into
        if storage is None:
            storage = torch.empty(stored.nbytes, dtype=torch.uint8, device=stored.device).untyped_storage()
        tensor = torch.empty(0, dtype=stored.dtype, device=stored.device)
        tensor.set_(storage, stored.offset, stored.size, stored.stride)
        ticket = self._read(stored, tensor)
        stored.readers += 1
        self._arriving[storage._cdata] = (ticket, stored)
        self.prefetched_bytes += stored.nbytes
        return tensor

    def await_prefetch(self, tensor: Tensor) -> None:
        """Wait until `tensor` is filled. Raises StoreError if that failed; it can then be awaited again, or cancelled."""
        key = tensor.untyped_storage()._cdata
        ticket, stored = self._arriving[key]
        self._arriving[key] = (None, stored)
        try:
            (ticket or self._read(stored, tensor)).wait()
        except BaseException:
            # Who gives up gives no notice, and another storage may get this one's address.
            weakref.finalize(tensor.untyped_storage(), _forget_arrival, weakref.ref(self), key)
            raise
        self._arrived(key)

    def settle(self) -> None:
        """Wait for all that is under way; a transfer that failed is started anew when it is awaited."""
        for stored in list(self._table.values()):  # a finalizer may take one out
            if stored.leaving is not None and _failed(stored.leaving):
                stored.leaving = None
        for key, (ticket, stored) in list(self._arriving.items()):
            if ticket is not None and _failed(ticket):
                self._arriving[key] = (None, stored)

    def cancel(self, tensor: Tensor) -> None:
        """Give up the prefetch of `tensor`, if it is under way: nothing will be written to it any more."""
        if arriving := self._arriving.get(key := tensor.untyped_storage()._cdata):
            if arriving[0] is not None:
                _failed(arriving[0])  # what nobody wants may fail
            self._arrived(key)

    def sent_back(self, tensor: Tensor) -> Tensor:
        """A handle of what the store has, in exchange for `tensor`, whose prefetch is given up."""
        key = tensor.untyped_storage()._cdata
        _, stored = self._arriving[key]
        again = replace(stored, readers=0, dropped=False)
        stored.readers += 1  # for good: the slot is no longer this one's to give back
        self.cancel(tensor)
        return self._handle(again)

    def _arrived(self, key: int) -> None:
        _, stored = self._arriving.pop(key)
        stored.readers -= 1
        if stored.dropped and not stored.readers:
            self.store.release(stored.slot)

    def _write(self, stored: _Stored, source: Tensor) -> Ticket:
        def job(bytes_: Tensor) -> None:
            if self._checks:
                stored.checksum = zlib.crc32(memory_of(bytes_))
            self.store.write(stored.slot, bytes_)

        return self._outward.submit(job, _bytes_of(source.untyped_storage()))

    def _read(self, stored: _Stored, target: Tensor) -> Ticket:
        def job(bytes_: Tensor) -> None:
            self.store.read(stored.slot, bytes_)
            if stored.checksum is not None and zlib.crc32(memory_of(bytes_)) != stored.checksum:
                raise StoreError(
                    f"the {self.store.name} store gave back other bytes than it was given "
                    f"({format_bytes(stored.nbytes)}, shape {tuple(stored.size)}): their checksums differ"
                )

        return self._inward.submit(job, _bytes_of(target.untyped_storage()))

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


def make_engine(store: Store, device: torch.device, *, checksum: bool = False) -> TransferEngine:
    """The engine for tensors on `device`, with the lanes of the store. Raises RequestError."""
    if checksum and device.type == "cuda":
        raise RequestError("checksum=True is for the CPU: on CUDA the processor does not see the bytes that are copied")
    return TransferEngine(store, *store.lanes(device), checksum=checksum)


def _failed(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except StoreError:
        return True
    return False


def _release(engine: weakref.ref[TransferEngine], key: int) -> None:
    if (alive := engine()) is not None:
        alive._forget(key)


def _forget_arrival(engine: weakref.ref[TransferEngine], key: int) -> None:
    alive = engine()
    if alive is not None and key in alive._arriving:
        alive._arrived(key)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    """The storage as a one-dimensional uint8 tensor, which keeps it alive."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
