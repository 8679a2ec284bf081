"""Plain CSVs of blocks, read and written by native code.

A million rows in a second. Plain is a CSV without quotes, gaps, or letters beyond ASCII, and without errors. The reader
of all other CSV, which says what is wrong and in which line, is `table.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from overspill.core.errors import InvalidLayout, RequestError

from ._packing import read_rows, with_offsets
from .columns import ANYWHERE, Columns, Integers
from .table import MOST, places_of, without_effect

_ROLES = ("id", "lower", "upper", "size", "alignment", "offset", "space")
"""Column roles, in the order of native/packing/csv_rows.hpp."""


@dataclass(frozen=True, eq=False)
class Rows:
    """The lines of the CSV `content`, one per block.

    Where each begins and ends, and its id in it.
    """

    content: bytes = field(repr=False)
    header: tuple[str, ...]
    line: Integers
    line_end: Integers
    id_begin: Integers
    id_end: Integers

    def name(self, position: int) -> str:
        """The id of a block."""
        return self.content[int(self.id_begin[position]) : int(self.id_end[position])].decode("ascii")

    @property
    def names(self) -> list[str]:
        """The ids of all blocks."""
        return list(map(self.name, range(len(self.line))))

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Columns that have no meaning here."""
        return without_effect(self.header)

    def with_offsets(self, offsets: Sequence[int]) -> bytes:
        """The CSV with the column `offset`, new ones last."""
        known = [name.strip().lower() for name in self.header]
        place = known.index("offset") if "offset" in known else -1
        header = (*self.header[:place], "offset", *self.header[place + 1 :]) if place >= 0 else (*self.header, "offset")
        values = np.array(offsets, dtype=np.int64)
        return ",".join(header).encode() + b"\n" + with_offsets(self.content, self.line, self.line_end, values, place)


def plain_rows(content: bytes, path: str | Path) -> tuple[Rows, Columns] | None:
    """The rows of `content` and their blocks; None if the CSV is not plain.

    Or if anything is wrong with it.
    """
    first = content.find(b"\n") + 1
    head = content[:first].strip(b"\r\n")
    if not head or not head.isascii() or b'"' in head:
        return None
    # The header tells the columns; gaps are for the other reader.
    header = tuple(head.decode("ascii").split(","))
    try:
        places, inclusive = places_of(header, path, 1)
    except RequestError:  # the other reader says which
        return None
    if "gaps" in places:
        return None
    # Read all cells in native code.
    found = read_rows(content, first, len(header), [places.get(role, -1) for role in _ROLES])
    if found is None:
        return None
    # The blocks, if they are valid.
    id_begin, lower, upper, size, alignment, pinned, space, id_end, line, line_end = found
    count, none = len(line), np.zeros(0, dtype=np.int64)
    columns = Columns(
        lower, upper + inclusive, size, alignment, pinned, space, np.zeros(count + 1, dtype=np.int64), none, none
    )
    if not _sound(columns):
        return None
    return Rows(content, header, line, line_end, id_begin, id_end), columns


def _sound(columns: Columns) -> bool:
    """Whether all blocks are valid."""
    if (columns.pinned < ANYWHERE).any():
        return False
    try:
        columns.refuse_flaws()
        held = np.flatnonzero(columns.pinned != ANYWHERE)
        if held.size:
            _refuse_overlap(columns, held)
    except (RequestError, InvalidLayout):  # the other reader says which
        return False
    tops = columns.nbytes.astype(np.float64) + columns.alignment + np.maximum(columns.pinned, 0)
    return bool(tops.sum() < MOST / 2)


def _refuse_overlap(columns: Columns, held: Integers) -> None:
    none = np.zeros(0, dtype=np.int64)
    pinned = Columns(
        columns.start[held],
        columns.end[held],
        columns.nbytes[held],
        columns.alignment[held],
        columns.pinned[held],
        columns.space[held],
        np.zeros(len(held) + 1, dtype=np.int64),
        none,
        none,
    )
    pinned.refuse_overlaps(pinned.pinned)
