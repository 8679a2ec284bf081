"""Free ranges of host memory that is in chunks."""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple


class HostPiece(NamedTuple):
    """A range of a chunk of host memory."""

    chunk: int
    offset: int
    nbytes: int


class FreeMemory:
    """The free ranges of host memory, in order."""

    def __init__(self) -> None:
        self._pieces: list[HostPiece] = []
        self.nbytes = 0

    def take(self, nbytes: int) -> tuple[HostPiece, ...] | None:
        """Return ranges of `nbytes` in all, one if that is large enough, otherwise the largest; None without enough."""
        if self.nbytes < nbytes:
            return None
        fitting = [piece for piece in self._pieces if piece.nbytes >= nbytes]
        taken, missing = [], nbytes
        by_size = sorted(self._pieces, key=lambda piece: -piece.nbytes)
        for piece in [min(fitting, key=lambda piece: piece.nbytes)] if fitting else by_size:
            part = HostPiece(piece.chunk, piece.offset, min(piece.nbytes, missing))
            self._pieces.remove(piece)
            if part.nbytes < piece.nbytes:
                insort(self._pieces, HostPiece(piece.chunk, piece.offset + part.nbytes, piece.nbytes - part.nbytes))
            taken.append(part)
            missing -= part.nbytes
            if not missing:
                break
        self.nbytes -= nbytes
        return tuple(taken)

    def give(self, pieces: Sequence[HostPiece]) -> None:
        """Take ranges back, and join neighbours."""
        for piece in pieces:
            insort(self._pieces, piece)
            self.nbytes += piece.nbytes
        joined: list[HostPiece] = []
        for piece in self._pieces:
            last = joined[-1] if joined else None
            if last is not None and (last.chunk, last.offset + last.nbytes) == (piece.chunk, piece.offset):
                joined[-1] = last._replace(nbytes=last.nbytes + piece.nbytes)
            else:
                joined.append(piece)
        self._pieces = joined
