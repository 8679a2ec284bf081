"""Blocks as CSV, one line a block, in minimalloc's columns.

    id,lower,upper,size[,alignment][,offset][,gaps][,space]

A block is live in the half-open interval [lower, upper). Columns may come in any order and under minimalloc's other names:
`start` or `begin` for lower, `buffer` or `buffer_id` for id. `end` stands for upper but is INCLUSIVE: the block is still
live at `end`, and with that column the ends of gaps are inclusive too (minimalloc, src/converter.cc, FromCsv). `offset`
is where the block must lie (-1 or nothing: anywhere). `gaps` are times at which it is dead, as `3-5 9-12`. Other columns
have no meaning here, and are kept. Blank lines are skipped.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from overspill.core import Block, Layout, Trace
from overspill.core.errors import InvalidLayout, RequestError

from .verdict import space_peaks

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps", "space")
SYNONYMS = {"start": "lower", "begin": "lower", "end": "upper", "buffer": "id", "buffer_id": "id"}
INCLUSIVE = "end"
MOST = 1 << 62
"""Limit of times and sizes, whose sums are signed 64-bit numbers in the solvers."""
_WHOLE = re.compile(r"[+-]?[0-9]+")
_MOST_DIGITS = 19
_GAP = re.compile(r"(-?[0-9]{1,19})-(-?[0-9]{1,19})")
_MOST_SHOWN = 40


@dataclass(frozen=True)
class BlockTable:
    """The cells of a CSV of blocks: header, and a row per block."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, trace: Trace, addresses: Sequence[int] = ()) -> BlockTable:
        """The table of `trace`, without optional columns that are all default.

        `addresses` are where the blocks lay when they were recorded; where they are known there are streams too.
        """
        blocks = trace.blocks
        columns: dict[str, list[str]] = {
            "id": [str(b.id) for b in blocks],
            "lower": [str(b.start) for b in blocks],
            "upper": [str(b.end) for b in blocks],
            "size": [str(b.nbytes) for b in blocks],
        }
        # Optional columns.
        if any(b.alignment != 1 for b in blocks):
            columns["alignment"] = [str(b.alignment) for b in blocks]
        if any(b.gaps for b in blocks):
            columns["gaps"] = [" ".join(f"{low}-{high}" for low, high in b.gaps) for b in blocks]
        if any(b.space for b in blocks):
            columns["space"] = [str(b.space) for b in blocks]
        if any(b.name for b in blocks):
            columns["name"] = [b.name for b in blocks]
        if addresses or any(b.stream for b in blocks):
            columns["stream"] = [str(b.stream) for b in blocks]
        if addresses:
            columns["address"] = [str(address) for address in addresses]
        # A row for each block.
        return cls(tuple(columns), tuple(zip(*columns.values(), strict=True)))

    def with_offsets(self, offsets: Sequence[int]) -> BlockTable:
        """The same cells with the column `offset`, new ones last."""
        at = next((i for i, name in enumerate(self.header) if _role(name) == "offset"), len(self.header))
        header = (*self.header[:at], "offset", *self.header[at + 1 :])
        pairs = zip(self.rows, offsets, strict=True)
        return BlockTable(header, tuple((*row[:at], str(offset), *row[at + 1 :]) for row, offset in pairs))

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Columns that have no meaning here."""
        return without_effect(self.header)

    @property
    def text(self) -> str:
        """The CSV."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(self.rows)
        return out.getvalue()


def parse_table(text: str, path: str | Path) -> tuple[BlockTable, Trace]:
    """The cells of the CSV `text`, and the blocks they mean.

    A block's `name` is its id in the file. Raises RequestError with `path`, the line and what would work.
    """
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows: list[tuple[int, list[str]]] = []
    try:
        rows += ((reader.line_num, row) for row in reader if any(cell.strip() for cell in row))
    except csv.Error as error:
        raise _wrong(path, reader.line_num, f"{error}; cells are separated by commas, quotes come in pairs") from None
    if not rows:
        raise RequestError(f"{path} is empty; a CSV of blocks begins with a line like {','.join(REQUIRED)}")
    # The header, then a block for each line.
    line, header = rows[0]
    places, inclusive = places_of(header, path, line)
    blocks: list[Block] = []
    lines: dict[str, int] = {}
    for line, row in rows[1:]:
        if len(row) != len(header):
            raise _wrong(path, line, f"{len(row)} cells under the {len(header)} columns of the first line")
        try:
            block = _block(len(blocks), {role: row[at].strip() for role, at in places.items()}, inclusive)
        except RequestError as error:
            raise _wrong(path, line, str(error)) from None
        if (before := lines.setdefault(block.name, line)) != line:
            raise _wrong(path, line, f"the id {_shown(block.name)} is that of line {before} too; ids must differ")
        blocks.append(block)
    # Checks of all blocks together.
    trace = Trace(tuple(blocks))
    refuse_too_large(trace, path)
    pinned = (block for block in blocks if block.pinned is not None)
    refuse_pinned_overlap((replace(block, id=lines[block.name]) for block in pinned), f"{path}, by line")
    return BlockTable(tuple(header), tuple(tuple(row) for _, row in rows[1:])), trace


def without_effect(header: Sequence[str]) -> tuple[str, ...]:
    """Columns of `header` that have no meaning here."""
    return tuple(name.strip() for name in header if _role(name) not in (*REQUIRED, *OPTIONAL))


def places_of(header: Sequence[str], path: str | Path, line: int) -> tuple[dict[str, int], bool]:
    """The column of each role, and whether ends are inclusive.

    Inclusive: a block is still live at its last time.
    """
    places = _places(header, path, line)
    return places, header[places["upper"]].strip().lower() == INCLUSIVE


def refuse_flaw(block: Block) -> None:
    """Raise RequestError for a block that can be placed nowhere.

    The error does not say which block it is.
    """
    if block.end < block.start:
        raise RequestError(f"lives from {block.start} to {block.end}; upper must not be below lower")
    if block.nbytes < 0:
        raise RequestError(f"size {block.nbytes} is negative; a size is a whole number of bytes from 0")
    if block.alignment < 1:
        raise RequestError(f"alignment {block.alignment} is below 1; write 1 where any address will do")
    if block.pinned is not None and (block.pinned < 0 or block.pinned % block.alignment):
        what = f"a multiple of the alignment {block.alignment}" if block.pinned >= 0 else "an address from 0"
        raise RequestError(
            f"offset {block.pinned} is not {what}; write -1 or nothing for a block that may lie anywhere"
        )
    # Gaps are in order.
    edges = [block.start, *(edge for gap in block.gaps for edge in gap), block.end]
    if any(low > high for low, high in pairwise(edges)):
        gaps = " ".join(f"{low}-{high}" for low, high in block.gaps)
        raise RequestError(f"gaps {_shown(gaps)} are not in order within {block.start} to {block.end}")


def refuse_too_large(trace: Trace, path: str | Path) -> None:
    """Raise RequestError where any layout's addresses may exceed 64 bits."""
    tops = (b.nbytes + b.alignment + (b.pinned or 0) for b in trace.blocks)
    if sum(tops) >= MOST or any(abs(edge) >= MOST for b in trace.blocks for edge in (b.start, b.end, b.space)):
        raise RequestError(f"{path}: times, or sizes in all, reach 2**62; state them in larger units")


def refuse_pinned_overlap(blocks: Iterable[Block], where: str) -> None:
    """Raise RequestError where pinned blocks overlap; it names their ids."""
    pinned = Trace(tuple(block for block in blocks if block.pinned is not None))
    offsets = tuple(block.pinned or 0 for block in pinned.blocks)
    try:
        Layout("pinned", offsets, sum(space_peaks(pinned, offsets).values()), pinned.lower_bound_bytes).validate(pinned)
    except InvalidLayout as error:
        raise RequestError(f"{where}: pinned {error}; write -1 or nothing as the offset of one") from None


def _places(header: Sequence[str], path: str | Path, line: int) -> dict[str, int]:
    """The column of each role in the header."""
    places: dict[str, int] = {}
    for at, name in enumerate(header):
        role = _role(name)
        if role in places and role in (*REQUIRED, *OPTIONAL):
            both = f"{header[places[role]].strip()!r} and {name.strip()!r}"
            raise _wrong(path, line, f"the columns {both} mean the same; leave one out")
        places.setdefault(role, at)
    # All required roles are there.
    missing = [role for role in REQUIRED if role not in places]
    if missing:
        what = f"no column {' and no column '.join(map(repr, missing))}"
        raise _wrong(path, line, f"{what}; a CSV of blocks begins with a line like {','.join(REQUIRED)}")
    return {role: places[role] for role in (*REQUIRED, *OPTIONAL) if role in places}


def _role(name: str) -> str:
    plain = name.strip().lower()
    return SYNONYMS.get(plain, plain)


def _block(position: int, cells: Mapping[str, str], inclusive: bool) -> Block:
    """The block of one line's cells. Raises RequestError without the line."""
    # The id must be there and printable.
    if not cells["id"]:
        raise RequestError("the id is empty; give every block its own")
    if not cells["id"].isprintable():
        raise RequestError(f"the id {_shown(cells['id'])} cannot be printed; use letters, digits and signs")
    # Read all cells, then check the block.
    pinned = _optional("offset", cells, -1)
    block = Block(
        position,
        _whole("lower", cells["lower"]),
        _whole("upper", cells["upper"]) + inclusive,
        _whole("size", cells["size"]),
        name=cells["id"],
        alignment=_optional("alignment", cells, 1),
        pinned=None if pinned == -1 else pinned,
        gaps=tuple(_gaps(cells.get("gaps", ""), inclusive)),
        space=_optional("space", cells, 0),
    )
    try:
        refuse_flaw(block)
    except RequestError as error:
        raise RequestError(f"block {_shown(block.name)}: {error}") from None
    return block


def _gaps(cell: str, inclusive: bool) -> Iterable[tuple[int, int]]:
    for gap in cell.split():
        found = _GAP.fullmatch(gap)
        if found is None:
            windows = "; windows within gaps are not known here" if "@" in gap else ""
            raise RequestError(f"{_shown(gap)} in gaps is not a pair of times like 3-5{windows}")
        yield int(found[1]), int(found[2]) + inclusive


def _optional(column: str, cells: Mapping[str, str], default: int) -> int:
    cell = cells.get(column)
    return _whole(column, cell) if cell else default


def _whole(column: str, cell: str) -> int:
    if _WHOLE.fullmatch(cell) is None:
        raise RequestError(f"{column} is {_shown(cell)}, which is not a whole number like 1048576")
    if len(cell.lstrip("+-0")) > _MOST_DIGITS:
        raise RequestError(f"{column} is {_shown(cell)}, which is above 2**62; state times and sizes in larger units")
    return int(cell)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


def _wrong(path: str | Path, line: int, what: str) -> RequestError:
    return RequestError(f"{path}, line {line}: {what}")
