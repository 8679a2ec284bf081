"""The transfer engine: Offload, AwaitOffload, Prefetch and AwaitPrefetch for one store."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch import Tensor, UntypedStorage

from overspill.core import Verb
from overspill.core.errors import RequestError, StoreError
from overspill.pytorch.dispatch import disable_current_modes
from overspill.pytorch.storages import key_of, storage_key
from overspill.runtime.recording.recorder import RunRecorder

from .checksums import Checksums
from .host_lane import HostLane, HostUpdate
from .lanes import HeldSlot, Lane, Noted, Slot, ThreadLane, Ticket, bytes_of
from .stores import Store

_LOG = logging.getLogger("overspill")


class _Stored:
    """One offloaded storage: its slot, and the tensor's layout in it.

    `leaving` is the copy to the store while it is in progress, and `written` is set when it is done. `updating` is the
    last update on the host that writes it, and `on_host` the tensor on the store's own memory. `handle` refers to the
    handle weakly.
    """

    __slots__ = (
        "device", "dropped", "dtype", "handle", "leaving", "nbytes", "offset", "on_host", "readers", "size", "slot",
        "stride", "updating", "written",
    )  # fmt: skip

    def __init__(
        self,
        slot: Slot,
        nbytes: int,
        size: torch.Size,
        stride: tuple[int, ...],
        offset: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slot = slot
        self.nbytes = nbytes
        self.size = size
        self.stride = stride
        self.offset = offset
        self.dtype = dtype
        self.device = device
        self.handle: _HandleRef | None = None
        self.leaving: Ticket | None = None
        self.written = False
        self.updating: HostUpdate | None = None
        self.on_host: Tensor | None = None
        self.readers = 0
        self.dropped = False

    def empty(self) -> Tensor:
        """Return a new uninitialised tensor for it, on its device."""
        if self.offset == 0 and self.size.numel() * self.dtype.itemsize == self.nbytes:  # dense, as nearly all are
            tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
            if tensor.untyped_storage().nbytes() == self.nbytes:
                return tensor
        return self.within(torch.empty(self.nbytes, dtype=torch.uint8, device=self.device).untyped_storage())

    def within(self, storage: UntypedStorage) -> Tensor:
        """Return the tensor, laid out in `storage`."""
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        return tensor.set_(storage, self.offset, self.size, self.stride)

    def bytes_on_host(self) -> Tensor:
        """Return the store's own memory of it, which `on_host` has laid out."""
        assert self.on_host is not None
        return bytes_of(self.on_host.untyped_storage())

    def update_under_way(self) -> HostUpdate | None:
        """Return the update that writes it, if that is not done."""
        if self.updating is not None and self.updating.is_done:
            self.updating = None
        return self.updating


class _HandleRef(weakref.ref[UntypedStorage]):
    """Weak reference to the storage of a handle."""

    __slots__ = ("key", "stored")
    key: int
    """Address of the handle, its key in the table."""
    stored: _Stored
    """The offloaded storage of the handle."""


class TransferEngine:
    """Moves storages between the device and `store` on two lanes, one each way.

    An offloaded tensor becomes a *handle*: a tensor of one element, whose address is the key to a table. Autograd can
    save it. When autograd drops it (backward done, or never run), the death of its storage frees the slot.

    A transfer that failed can be awaited again, which starts it again. Nothing is lost before that. The lanes write and
    read through `checksums`, if given.
    """

    def __init__(self, store: Store, outward: Lane, inward: Lane, checksums: Checksums | None = None) -> None:
        self.store = store
        self._checksums = checksums
        self._outward = outward
        self._inward = inward
        self._table: dict[int, _Stored] = {}
        self._arriving: dict[int, tuple[Ticket | None, _Stored]] = {}
        self._handle_died = _when_a_handle_dies(self)
        self.updates = HostLane()
        """The lane of updates on the host."""
        self.recorder: RunRecorder | None = None
        """The recorder of copies, or None."""
        self.offloaded_bytes = 0
        self.prefetched_bytes = 0
        self.waited_seconds = 0.0
        """Seconds that the host waited for transfers: on the CPU compute waits, on CUDA the host never does."""

    @property
    def stored_count(self) -> int:
        """The number of storages now in the store."""
        return len(self._table)

    def offload(self, source: Tensor) -> Tensor:
        """Start copying the whole storage of `source` to the store, and return its handle. Raises StoreError."""
        memory = source.untyped_storage()
        nbytes = memory.nbytes()
        stored = _Stored(
            self.store.allocate(nbytes), nbytes,
            source.size(), source.stride(), source.storage_offset(), source.dtype, source.device,
        )  # fmt: skip
        try:
            stored.leaving = self._outward.submit(stored.slot, memory, self._noted(Verb.OFFLOAD))
        except BaseException:
            self.store.release(stored.slot)
            raise
        self.offloaded_bytes += nbytes
        return self._handle(stored)

    def blank(self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the handle of a dense tensor without values yet.

        It has space in the store; nothing is copied.
        """
        nbytes = size.numel() * dtype.itemsize
        slot = self.store.allocate(nbytes)
        if self._checksums is not None:
            self._checksums.forget(slot)
        stored = _Stored(slot, nbytes, size, stride, 0, dtype, device)
        stored.written = True
        return self._handle(stored)

    def hold(self, source: Tensor, device: torch.device) -> Tensor:
        """Return the handle of a dense tensor in host memory, to be read from there for `device`.

        Raises StoreError.
        """
        slot = self.store.hold(source)
        if self._checksums is not None and not isinstance(slot, HeldSlot):
            self._checksums.forget(slot)
        stored = _Stored(slot, source.nbytes, source.size(), source.stride(), 0, source.dtype, device)
        stored.written = True
        return self._handle(stored)

    def to_host(self, handle: Tensor) -> Tensor:
        """Return the tensor of `handle` in host memory: itself if it is held there, otherwise a copy.

        Raises StoreError.
        """
        self.await_offload(handle)
        self._outward.drain()
        stored = self._table[handle.data_ptr()]
        self._updated(stored)
        if isinstance(stored.slot, HeldSlot):
            self._inward.drain()  # copies from there may be under way, and the caller may write
            return stored.slot.tensor
        memory = torch.empty(stored.nbytes, dtype=torch.uint8, device="cpu").untyped_storage()
        (self._checksums or self.store).fetch(stored.slot, bytes_of(memory))
        tensor = torch.empty(0, dtype=stored.dtype, device="cpu")
        return tensor.set_(memory, stored.offset, stored.size, stored.stride)

    def _handle(self, stored: _Stored) -> Tensor:
        handle = torch.empty(1, dtype=torch.int64, device="cpu")
        alive = _HandleRef(handle.untyped_storage(), self._handle_died)
        alive.key, alive.stored = handle.data_ptr(), stored
        stored.handle = alive
        self._table[alive.key] = stored
        return handle

    def view(self, handle: Tensor, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Let the storage of `handle` come back with another layout of the same bytes, and return the handle."""
        stored = self._table[handle.data_ptr()]
        stored.size, stored.stride, stored.offset, stored.dtype, stored.on_host = size, stride, 0, dtype, None
        return handle

    def await_offload(self, handle: Tensor, source: Tensor | None = None) -> None:
        """Wait until the copy of `handle` is done.

        Raises StoreError if it failed. It can then be awaited again with its `source`, which is copied again.
        """
        stored = self._table[handle.data_ptr()]
        # Forgotten first: a ticket that failed holds the error, whose traceback would hold the handle and so the slot.
        leaving, stored.leaving = stored.leaving, None
        if leaving is None and not stored.written:
            assert source is not None
            leaving = self._outward.submit(stored.slot, source.untyped_storage(), self._noted(Verb.OFFLOAD))
        if leaving is not None:
            begun = time.perf_counter()
            leaving.wait()
            self.waited_seconds += time.perf_counter() - begun
        stored.written = True

    def prefetch(self, handle: Tensor, into: UntypedStorage | None = None) -> Tensor:
        """Start bringing `handle` back, and return the tensor with its old strides.

        It must not be read before `await_prefetch`. Its bytes go to new memory, or to the storage `into` of the same
        size.
        """
        stored = self._table[handle.data_ptr()]
        tensor = stored.empty() if into is None else stored.within(into)
        storage = tensor.untyped_storage()
        ticket = self._read(stored, storage)
        stored.readers += 1
        self._arriving[key_of(storage)] = (ticket, stored)
        self.prefetched_bytes += stored.nbytes
        return tensor

    def await_prefetch(self, tensor: Tensor) -> Tensor:
        """Wait until `tensor` is filled, and return it.

        Raises StoreError if that failed; it can then be awaited again, or cancelled.
        """
        storage = tensor.untyped_storage()
        key = key_of(storage)
        ticket, stored = self._arriving[key]
        begun = time.perf_counter()
        try:
            try:
                (ticket or self._read(stored, storage)).wait()
            finally:
                self.updates.check()  # its last update may have failed
        except BaseException:
            # Without the ticket: the next wait starts the copy again.
            self._arriving[key] = (None, stored)
            # Who gives up gives no notice, and another storage may get this one's address.
            weakref.finalize(storage, _forget_arrival, weakref.ref(self), key)
            raise
        self.waited_seconds += time.perf_counter() - begun
        self._arrived(key)
        return tensor

    def _read(self, stored: _Stored, storage: UntypedStorage) -> Ticket:
        """Start the copy to `storage`, behind the update that writes what it reads."""
        noted = self._noted(Verb.PREFETCH)
        self.updates.restart()
        if (updating := stored.update_under_way()) is not None:
            return self._inward.submit_after(updating, stored.slot, storage, noted)
        return self._inward.submit(stored.slot, storage, noted)

    # -- updates on the host

    def update(self, what: str, run: Callable[..., None], given: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Start the update `what` in the host's thread: `run` of what the handles `given` stand for.

        It gets tensors on the store's own memory, and writes those of `writes`. Later prefetches of these wait for its
        end. Raises StoreError, and the error of an update that failed before.
        """
        for handle in given:
            self.await_offload(handle)
        used, written = ([self._table[handle.data_ptr()] for handle in of] for of in (given, writes))
        for of in written:
            if isinstance(of.slot, HeldSlot) and not of.slot.tensor.untyped_storage().resizable():
                self._leave_file(of, of.slot)
        tensors = [self._show(of) for of in used] if self.store.stays else []
        after = self._outward.mark(), self._inward.mark()

        def ready() -> ExitStack:
            for wait in after:
                wait()
            return self._lent(used, written)

        def update(_in_use: Sequence[Tensor] = (*given, *writes)) -> None:
            with self._checked(used, written):
                run(*(tensors or [of.on_host for of in used]))

        noted = None if self.recorder is None else self.recorder.updating()
        begun, over = partial(self._begun, written), partial(self.store.expect, -1)
        self.updates.submit(HostUpdate(what, update, ready, begun, over, self.updates, noted))

    def _begun(self, written: Sequence[_Stored], update: HostUpdate) -> None:
        """Note which update writes what; copies that came back from there before it are to come again."""
        for key, (ticket, of) in list(self._arriving.items()):
            if ticket is not None and of in written:
                _failed(ticket)
                self._arriving[key] = (None, of)
        for of in written:
            of.updating = update
        self.store.expect(1)

    def _lent(self, used: Sequence[_Stored], written: Sequence[_Stored]) -> ExitStack:
        """Return what holds the memory of `used` where the store lends it for the time of an update."""
        with ExitStack() as lent:
            for of in () if self.store.stays else used:
                memory = self.store.lent(of.slot, of.nbytes, writes=of in written)
                of.on_host = of.within(lent.enter_context(memory))
            return lent.pop_all()

    @contextmanager
    def _checked(self, used: Sequence[_Stored], written: Sequence[_Stored]) -> Iterator[None]:
        """Compare checksums before an update on the host, and record them behind it. Raises StoreError."""
        if self._checksums is None:
            yield
            return
        for of in used:
            self._checksums.check(of.slot, of.bytes_on_host())
        yield
        for of in written:
            self._checksums.note(of.slot, of.bytes_on_host())

    def _show(self, stored: _Stored) -> Tensor:
        """Return what the store has of it on the store's own memory, which no mode counts. Raises StoreError."""
        if stored.on_host is None:
            with disable_current_modes():
                memory = self.store.memory(stored.slot, stored.nbytes) if stored.nbytes else UntypedStorage(0)
                stored.on_host = stored.within(memory)
        return stored.on_host

    def _leave_file(self, stored: _Stored, held: HeldSlot) -> None:
        """Give it a slot of its own in place of a mapped file, whose locked pages the host must not copy to write."""
        stored.slot = self.store.allocate(stored.nbytes)
        with disable_current_modes():
            bytes_of(self._show(stored).untyped_storage()).copy_(held.memory)
        self.store.release(held)

    def _updated(self, stored: _Stored) -> None:
        """Wait for the update that writes it, if any. Raises the error of one that failed."""
        self.updates.restart()
        if (updating := stored.update_under_way()) is not None:
            updating.wait()
        self.updates.check()

    def end_step(self) -> None:
        """Wait for updates at the end of a step that needs them. Raises the error of one that failed."""
        if self.updates.ends_with_step:
            self.updates.finish()

    def shown(self, handle: Tensor) -> Tensor:
        """Return what `handle` stands for as a tensor of the host, on the store's own memory. Raises StoreError."""
        self.await_offload(handle)
        stored = self._table[handle.data_ptr()]
        self._updated(stored)
        memory = self.store.shown(stored.slot, stored.nbytes, handle)
        return memory.view(stored.dtype).as_strided(stored.size, stored.stride, stored.offset)

    def to_disk(self, handle: Tensor) -> None:
        """Let the bytes of `handle` go on to the disk below the store, if it has one."""
        self._behind_update(self._table[handle.data_ptr()], self.store.to_disk)

    def from_disk(self, handle: Tensor) -> None:
        """Bring the bytes of `handle` back from the disk below the store, if they are there."""
        self._behind_update(self._table[handle.data_ptr()], self.store.from_disk)

    def _behind_update(self, stored: _Stored, call: Callable[[Slot], None]) -> None:
        """Call `call` of its slot once no update on the host writes it."""
        if (updating := stored.update_under_way()) is not None:
            updating.then(partial(call, stored.slot))
        else:
            call(stored.slot)

    def settle(self) -> None:
        """Wait for all transfers in progress.

        One that fails is started again when it is awaited.
        """
        for stored in list(self._table.values()):  # a finalizer may take one out
            if stored.leaving is not None and _failed(stored.leaving):
                stored.leaving = None
        for key, (ticket, stored) in list(self._arriving.items()):
            if ticket is not None and _failed(ticket):
                self._arriving[key] = (None, stored)
        for lane in (self._outward, self._inward):
            lane.drain()  # copies of what has been dropped meanwhile hold its memory

    def cancel(self, tensor: Tensor) -> None:
        """Cancel the prefetch of `tensor`, if one is in progress.

        Nothing will be written to it afterwards.
        """
        if arriving := self._arriving.get(key := storage_key(tensor)):
            if arriving[0] is not None:
                _failed(arriving[0])  # a cancelled read may fail
            self._arrived(key)

    def sent_back(self, tensor: Tensor) -> Tensor:
        """Return a new handle in exchange for `tensor`, and cancel its prefetch."""
        key = storage_key(tensor)
        _, stored = self._arriving[key]
        again = _Stored(
            stored.slot, stored.nbytes, stored.size, stored.stride, stored.offset, stored.dtype, stored.device
        )
        again.written, again.updating = True, stored.updating
        stored.readers += 1  # for good: the slot is no longer this one's to give back
        self.cancel(tensor)
        return self._handle(again)

    def _noted(self, verb: Verb) -> Noted | None:
        return None if self.recorder is None else self.recorder.copying(verb)

    def _arrived(self, key: int) -> None:
        _, stored = self._arriving.pop(key)
        stored.readers -= 1
        if stored.dropped and not stored.readers:
            self.store.release(stored.slot)

    def use(self, store: Store, device: torch.device) -> None:
        """Switch to another `store`, with its lanes for `device`.

        Nothing may be stored or in progress.
        """
        self.updates.finish()
        self._outward.close()
        self._inward.close()
        self.store = store
        self._outward, self._inward = store.lanes(device)

    def close(self) -> None:
        """Finish updates and transfers, and release the store, even after errors."""
        lanes = self._inward.close, self._outward.close
        with ExitStack() as end:  # the last first
            for let_go in (self.store.close, self._table.clear, self._arriving.clear, *lanes):
                end.callback(let_go)
            self.updates.close()

    def close_dropped(self) -> None:
        """Close after the owner was garbage collected, and log errors."""
        try:
            self.close()
        except RuntimeError as error:
            _LOG.warning("the store of what was dropped could not be given back in order: %s", first_line(error))

    def _drop(self, stored: _Stored) -> None:
        stored.dropped = True
        if not stored.readers:  # else the slot is still being read: the await releases it
            self.store.release(stored.slot)


def make_engine(store: Store, device: torch.device, *, checksum: bool = False) -> TransferEngine:
    """Return the engine for tensors on `device`, with the lanes of the store. Raises RequestError."""
    if not checksum:
        return TransferEngine(store, *store.lanes(device))
    if device.type == "cuda":
        raise RequestError("checksum=True is for the CPU: on CUDA the processor does not see the bytes that are copied")
    checksums = Checksums(store)
    return TransferEngine(
        store, ThreadLane("offload", checksums.write), ThreadLane("prefetch", checksums.fetch), checksums
    )


def _failed(ticket: Ticket) -> bool:
    try:
        ticket.wait()
    except (StoreError, RuntimeError):  # of the store, or of a device on which nothing works any more
        return True
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of `error`, without the debugging hints of a device."""
    return str(error).partition("\n")[0]


def _when_a_handle_dies(engine: TransferEngine) -> Callable[[weakref.ref[UntypedStorage]], None]:
    """Return a callback that frees the slot of a dead handle, and does not keep `engine` alive."""
    known = weakref.ref(engine)

    def died(handle: weakref.ref[UntypedStorage]) -> None:
        assert isinstance(handle, _HandleRef)
        stored = handle.stored
        stored.handle = None  # nothing is left for the garbage collector, which may come late
        if (alive := known()) is None:
            return
        if alive._table.get(handle.key) is stored:  # else all was closed, or its address is another handle's already
            del alive._table[handle.key]
        alive._drop(stored)

    return died


def _forget_arrival(engine: weakref.ref[TransferEngine], key: int) -> None:
    alive = engine()
    if alive is not None and key in alive._arriving:
        alive._arrived(key)
