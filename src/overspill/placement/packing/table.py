"""Blocks as CSV, one line a block, in minimalloc's columns.

    id,lower,upper,size[,alignment][,offset][,gaps][,space]

A block is live in the half-open interval [lower, upper). Columns may come in any order and under minimalloc's other
names: `start` or `begin` for lower, `buffer` or `buffer_id` for id. `end` stands for upper but is INCLUSIVE: the block
is still live at `end`. With that column the ends of gaps are inclusive too (minimalloc, src/converter.cc, FromCsv).
`offset` is the address that the block must have (-1 or nothing: any). `gaps` are times at which it is dead, as `3-5
9-12`. Other columns have no meaning here, and are kept. Blank lines are skipped.
"""

from __future__ import annotations

import csv
import io
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from overspill.core import Block, Layout, Trace
from overspill.core.errors import InvalidLayoutError, RequestError

from .columns import ANYWHERE, Columns, Integers
from .verdict import space_peaks

REQUIRED = ("id", "lower", "upper", "size")
OPTIONAL = ("alignment", "offset", "gaps", "space")
SYNONYMS = {"start": "lower", "begin": "lower", "end": "upper", "buffer": "id", "buffer_id": "id"}
INCLUSIVE = "end"
MOST = 1 << 62
"""Limit of times and sizes, whose sums are signed 64-bit numbers in the solvers."""
_DEFAULTS = {"lower": None, "upper": None, "size": None, "alignment": 1, "offset": ANYWHERE, "space": 0}
"""What an empty cell of each column of numbers means; None: a number is required."""
_BLANK = " \t,"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_MOST_DIGITS = 19
_GAP = re.compile(r"(-?[0-9]{1,18})-(-?[0-9]{1,18})")
_MOST_SHOWN = 40

Values = dict[str, Integers]
"""A column of numbers for each of _DEFAULTS."""
Gaps = list[tuple[tuple[int, int], ...]]
"""The gaps of each block, as the file has them."""


@dataclass(frozen=True)
class BlockTable:
    """A CSV of blocks: its header, and a line per block."""

    header: tuple[str, ...]
    lines: list[str] = field(repr=False)
    """CSV, each without a line end."""
    names: list[str] = field(repr=False)
    """The id of each block, as in the file."""

    @classmethod
    def of(cls, trace: Trace, addresses: Sequence[int] = ()) -> BlockTable:
        """Return the table of `trace`, without optional columns that are all default.

        `addresses` are those that the blocks had when they were recorded. With them the table has streams too.
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
        # A line for each block.
        return cls(tuple(columns), _written(zip(*columns.values(), strict=True)), columns["id"])

    def with_offsets(self, offsets: Sequence[int]) -> str:
        """Return the CSV with the column `offset`, a new one last."""
        at = next((i for i, name in enumerate(self.header) if _role(name) == "offset"), None)
        if at is None:
            header = (*self.header, "offset")
            lines = [f"{line},{offset}" for line, offset in zip(self.lines, offsets, strict=True)]
        else:
            header = self.header
            rows = zip(csv.reader(self.lines), offsets, strict=True)
            lines = _written((*row[:at], offset, *row[at + 1 :]) for row, offset in rows)
        return "\n".join([*_written([header]), *lines, ""])

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Columns that have no meaning here."""
        return tuple(name.strip() for name in self.header if _role(name) not in (*REQUIRED, *OPTIONAL))


def parse_table(text: str, path: str | Path) -> tuple[BlockTable, Columns]:
    """Return the CSV `text` as a table, and the blocks that it means.

    Raises RequestError with `path`, the line, and what would work.
    """
    numbers, lines, quoted = _lines(text, path)
    if not lines:
        raise RequestError(f"{path} is empty; a CSV of blocks begins with a line like {','.join(REQUIRED)}")
    # The header tells the columns.
    first, *numbers = numbers
    header = tuple(next(csv.reader(lines[:1])))
    del lines[0]
    places, inclusive = _places(header, path, first)
    # The ids, then all columns of numbers at once. What that refuses is read cell by cell.
    names = _names(_split(lines, quoted), len(header), places["id"], numbers, path)
    gaps: Gaps = [()] * len(names)
    values = None if "gaps" in places else _loaded(lines, places)
    if values is None:
        values, gaps = _read_cells(_split(lines, quoted), places, numbers, path)
    columns = _columns(values, gaps, inclusive)
    _refuse_flaws(columns, names, numbers, path)
    return BlockTable(header, lines, names), columns


def refuse_flaw(block: Block) -> None:
    """Raise RequestError for a block that cannot be placed anywhere; the error does not name the block."""
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
    """Raise RequestError if any layout's addresses may exceed 64 bits."""
    tops = (b.nbytes + b.alignment + (b.pinned or 0) for b in trace.blocks)
    if sum(tops) >= MOST or any(abs(edge) >= MOST for b in trace.blocks for edge in (b.start, b.end, b.space)):
        raise _too_large(path)


def refuse_pinned_overlap(blocks: Iterable[Block], where: str) -> None:
    """Raise RequestError if pinned blocks overlap; it names their ids."""
    pinned = Trace(tuple(block for block in blocks if block.pinned is not None))
    offsets = tuple(block.pinned or 0 for block in pinned.blocks)
    try:
        Layout("pinned", offsets, sum(space_peaks(pinned, offsets).values()), pinned.lower_bound_bytes).validate(pinned)
    except InvalidLayoutError as error:
        raise RequestError(f"{where}: pinned {error}; write -1 or nothing as the offset of one") from None


def _written(rows: Iterable[Iterable[object]]) -> list[str]:
    """Return each row as CSV, without a line end."""
    lines = _Lines()
    csv.writer(lines, lineterminator="").writerows(rows)
    return lines


class _Lines(list[str]):
    """The lines that a csv.writer writes."""

    def write(self, line: str) -> None:
        self.append(line)


def _lines(text: str, path: str | Path) -> tuple[list[int], list[str], bool]:
    """Return the lines that are not blank, the number of each in the file, and whether the text has quotes."""
    if '"' not in text:
        every = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        numbers = [number for number, line in enumerate(every, 1) if line.strip(_BLANK)]
        return numbers, [every[number - 1] for number in numbers], False
    # A cell in quotes may have line ends: each row becomes one line.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        rows = [(reader.line_num, row) for row in reader if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise _wrong(path, reader.line_num, f"{error}; cells are separated by commas, quotes come in pairs") from None
    return [number for number, _ in rows], _written(row for _, row in rows), True


def _split(lines: list[str], quoted: bool) -> Iterator[list[str]]:
    """Yield the cells of each line."""
    return iter(csv.reader(lines, strict=True)) if quoted else (line.split(",") for line in lines)


def _names(rows: Iterator[list[str]], width: int, at: int, numbers: list[int], path: str | Path) -> list[str]:
    """Return the id of each row. Raises RequestError if a row is not `width` cells wide, or an id is unusable."""
    names: list[str] = []
    for row in rows:
        if len(row) != width:
            what = f"{len(row)} cells under the {width} columns of the first line"
            raise _wrong(path, numbers[len(names)], what)
        names.append(row[at].strip())
    # Look for the line only where one is wrong.
    if len({*names}) == len(names) and all(names) and "".join(names).isprintable():
        return names
    lines: dict[str, int] = {}
    for name, line in zip(names, numbers, strict=True):
        if not name:
            raise _wrong(path, line, "the id is empty; give every block its own")
        if not name.isprintable():
            raise _wrong(path, line, f"the id {_shown(name)} cannot be printed; use letters, digits and signs")
        if (before := lines.setdefault(name, line)) != line:
            raise _wrong(path, line, f"the id {_shown(name)} is that of line {before} too; ids must differ")
    return names


def _loaded(lines: list[str], places: Mapping[str, int]) -> Values | None:
    """Return all columns of numbers; None if a cell is not an integer, or empty."""
    there = [role for role in _DEFAULTS if role in places]
    try:
        with warnings.catch_warnings(action="error"):  # no lines, or a fraction in older NumPy
            loaded = np.loadtxt(
                lines,
                np.int64,
                comments=None,
                delimiter=",",
                usecols=[places[role] for role in there],
                ndmin=2,
                encoding="utf-8",
                quotechar='"',
            )
    except (ValueError, Warning):
        return None
    absent = {role: np.full(len(lines), default) for role, default in _DEFAULTS.items() if role not in places}
    return absent | dict(zip(there, np.ascontiguousarray(loaded.T), strict=True))


def _read_cells(
    rows: Iterable[list[str]], places: Mapping[str, int], numbers: list[int], path: str | Path
) -> tuple[Values, Gaps]:
    """Return the columns of numbers and the gaps, cell by cell. Raises RequestError with the line."""
    values: dict[str, list[int]] = {role: [] for role in _DEFAULTS}
    gaps: Gaps = []
    for line, row in zip(numbers, rows, strict=True):
        cells = {role: row[at].strip() for role, at in places.items()}
        try:
            for role, default in _DEFAULTS.items():
                values[role].append(_whole(role, cells.get(role, ""), default))
            gaps.append(tuple(_gaps(cells.get("gaps", ""))))
        except RequestError as error:
            raise _wrong(path, line, str(error)) from None
    try:
        return {role: np.array(column, dtype=np.int64) for role, column in values.items()}, gaps
    except OverflowError:
        raise _too_large(path) from None


def _columns(values: Values, gaps: Gaps, inclusive: bool) -> Columns:
    """Return the blocks; `inclusive`: they and their gaps last until after their ends."""
    every = np.array([gap for of_block in gaps for gap in of_block], dtype=np.int64).reshape(-1, 2)
    return Columns(
        start=values["lower"],
        end=values["upper"] + inclusive,
        nbytes=values["size"],
        alignment=values["alignment"],
        pinned=values["offset"],
        space=values["space"],
        gap_first=np.cumsum([0, *map(len, gaps)]),
        gap_start=every[:, 0].copy(),
        gap_end=every[:, 1] + inclusive,
    )


def _refuse_flaws(columns: Columns, names: list[str], numbers: list[int], path: str | Path) -> None:
    """Raise RequestError with the line of a block that cannot be placed anywhere, or clashes with another."""
    # Sums of sizes, exactly where they may be too large.
    tops = columns.nbytes.astype(np.float64) + columns.alignment + np.maximum(columns.pinned, 0)
    edges = (np.abs(edge.astype(np.float64)).max(initial=0) for edge in (columns.start, columns.end, columns.space))
    if tops.sum() >= MOST / 2 or max(edges) >= MOST:
        refuse_too_large(columns.trace(), path)
    try:
        columns.refuse_flaws()
    except RequestError:
        for line, block in zip(numbers, columns.trace(names).blocks, strict=True):
            try:
                refuse_flaw(block)
            except RequestError as error:
                raise _wrong(path, line, f"block {_shown(block.name)}: {error}") from None
    # Pinned blocks.
    held = np.flatnonzero(columns.pinned != ANYWHERE)
    try:
        columns.only(held).refuse_overlaps(columns.pinned[held])
    except InvalidLayoutError:
        blocks = (replace(block, id=numbers[block.id]) for block in columns.trace().blocks)
        refuse_pinned_overlap(blocks, f"{path}, by line")


def _places(header: Sequence[str], path: str | Path, line: int) -> tuple[dict[str, int], bool]:
    """Return the column of each role, and whether a block is still live at the last time of its line."""
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
    known = {role: places[role] for role in (*REQUIRED, *OPTIONAL) if role in places}
    return known, header[places["upper"]].strip().lower() == INCLUSIVE


def _role(name: str) -> str:
    plain = name.strip().lower()
    return SYNONYMS.get(plain, plain)


def _gaps(cell: str) -> Iterable[tuple[int, int]]:
    for gap in cell.split():
        found = _GAP.fullmatch(gap)
        if found is None:
            windows = "; windows within gaps are not known here" if "@" in gap else ""
            raise RequestError(f"{_shown(gap)} in gaps is not a pair of times like 3-5{windows}")
        yield int(found[1]), int(found[2])


def _whole(column: str, cell: str, default: int | None) -> int:
    if default is not None and not cell:
        return default
    if _WHOLE.fullmatch(cell) is None:
        raise RequestError(f"{column} is {_shown(cell)}, which is not a whole number like 1048576")
    if len(cell.lstrip("+-0")) > _MOST_DIGITS:
        raise RequestError(f"{column} is {_shown(cell)}, which is above 2**62; state times and sizes in larger units")
    return int(cell)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…")


def _wrong(path: str | Path, line: int, what: str) -> RequestError:
    return RequestError(f"{path}, line {line}: {what}")


def _too_large(path: str | Path) -> RequestError:
    return RequestError(f"{path}: times, or sizes in all, reach 2**62; state them in larger units")
