"""Page-locked host memory for CUDA up to a budget, with a disk below it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from overspill.runtime import accelerator

from .lanes import Lane, Slot, StreamLane
from .pinned_store import PinnedStore
from .tiers import TieredSlot, TieredStore, alive


class PinnedDiskStore(TieredStore, PinnedStore):
    """Page-locked host memory for CUDA up to a budget, and a disk below it.

    The host waits where a copy is not in host memory, or has no space there; a GPU has the work that was given to it
    before. Host memory that a copy of the GPU uses is given to another slot once that copy is done.
    """

    name = "pinned+disk"

    def lanes(self, device: torch.device) -> tuple[Lane, Lane]:
        """Return two streams of `device`, one each way."""
        lanes = TieredLane(self, device, outward=True), TieredLane(self, device, outward=False)
        self._streams += [lane.stream for lane in lanes]
        return lanes

    def begin(self, slot: Slot, *, outward: bool) -> list[Tensor]:
        """Get the slot's host memory for a copy that leaves the device, or comes back; return its pieces."""
        assert isinstance(slot, TieredSlot)
        with self._lock:
            self._enter(slot, to_fill=outward)
            if outward:
                slot.state.is_on_disk = False
                slot.state.version += 1
            pieces = slot.state.pieces or ()
            return [self._chunks[piece.chunk][piece.offset : piece.offset + piece.nbytes] for piece in pieces]

    def end(self, slot: Slot, event: Any) -> None:
        """Let the slot's host memory go once the `event` at the end of the copy is done."""
        assert isinstance(slot, TieredSlot)
        with self._lock:
            if event is not None:
                slot.state.events.append(event)
            self._leave(slot)


class TieredLane(StreamLane):
    """A stream for copies from or to the host memory of a store with a disk below it."""

    def __init__(
        self, store: PinnedDiskStore, device: torch.device, *, outward: bool, streams: Any = accelerator
    ) -> None:
        super().__init__(device, self._copied, streams)
        self._store = weakref.ref(store)
        self._outward = outward

    def _copied(self, slot: Slot, memory: Tensor) -> None:
        """Enqueue the copy, once the slot has its host memory."""
        store, event = alive(self._store), None
        pieces = store.begin(slot, outward=self._outward)
        try:
            self._enqueue_pieces(pieces, memory)
            event = self.stream.record_event()
        finally:
            store.end(slot, event)

    def _enqueue_pieces(self, pieces: Sequence[Tensor], memory: Tensor) -> None:
        begin = 0
        for piece in pieces:
            there = memory[begin : begin + piece.numel()]
            here = piece[: there.numel()]
            (here if self._outward else there).copy_(there if self._outward else here, non_blocking=True)
            begin += piece.numel()
