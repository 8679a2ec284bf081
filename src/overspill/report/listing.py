"""Plain tables for a terminal, of names or figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from textwrap import wrap
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

_SHORT = 20
"""The length of the longest text that is never wrapped in a table, in characters."""
_NARROW = 76
_CLOSE_BY_ONE, _CLOSE = (0, 0, 0, 1), (0, 0, 0, 0)
_POWERS = ("", "k", "M", "G", "T", "P")


class Listing(Table):
    """A table that fits any terminal width without cutting words.

    In a narrow terminal its columns stand close together and long texts wrap. In a narrower one long texts go below
    their rows. Columns that still do not fit follow in a table of their own.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render the first layout that is narrow enough."""
        room = options.max_width
        # The width of each column on one line, and the least if long texts wrap.
        natural = [max(map(cell_len, (str(column.header), *map(str, column.cells)))) for column in self.columns]
        long = [not column.no_wrap and size > _SHORT for column, size in zip(self.columns, natural, strict=True)]
        least = [
            max(_longest_word(column), min(size, _SHORT)) if wraps else size
            for column, size, wraps in zip(self.columns, natural, long, strict=True)
        ]
        if self._with_gaps(natural) <= room:
            yield from super().__rich_console__(console, options)
            return
        # Wrap long texts, with less and less space between columns.
        for padding in (self.padding, _CLOSE):
            closer = copy(self)
            closer.padding = padding
            edges = closer.padding[1] + closer.padding[3]  # which rich counts, and leaves blank
            spare = room - edges - closer._with_gaps(least)
            if spare >= 0:
                for column, size in zip(closer.columns, _widened(least, natural, spare), strict=True):
                    column.width = size  # rich by itself gives wrapping columns more than there is
                yield from Table.__rich_console__(closer, console, options)
                return
        # Too narrow even so: several tables.
        yield from self._folded(room, least, long)

    def _with_gaps(self, widths: Sequence[int]) -> int:
        _, right, _, left = self.padding
        return sum(widths) + (left + right + 1) * (len(widths) - 1)

    def _folded(self, room: int, least: Sequence[int], long: Sequence[bool]) -> Iterator[RenderableType]:
        """Yield several tables, each with the columns that fit the width.

        Each begins with the first column; the last one has long texts below its rows.
        """
        first = min(room, max(_longest_word(self.columns[0]), min(least[0], room // 2)))
        # Fill each table with short columns until no room is left.
        pieces: list[list[int]] = [[]]
        left = room - first
        for index in range(1, len(self.columns)):
            if long[index]:
                continue
            if pieces[-1] and least[index] + 1 > left:
                pieces.append([])
                left = room - first
            pieces[-1].append(index)
            left -= least[index] + 1
        # Long texts go below the rows of the last one.
        texts = [index for index in range(1, len(self.columns)) if long[index]]
        for number, piece in enumerate(pieces):
            last = number == len(pieces) - 1
            yield from self._piece([0, *piece], [first, *(least[i] for i in piece)], texts if last else [])
            if not last:
                yield Text("")

    def _piece(self, shown: Sequence[int], widths: Sequence[int], below: Sequence[int]) -> Iterator[RenderableType]:
        """Yield one table of columns `shown`, with columns `below` under each row."""
        gap = 3 if sum(widths) + 3 * (len(widths) - 1) <= _NARROW else 1
        columns = [self.columns[index] for index in shown]
        if self.show_header:
            yield Text(_line([str(column.header) for column in columns], columns, widths, gap), style="bold")
            yield Text("─" * (sum(widths) + gap * (len(widths) - 1)))
        for cells in zip(*([str(cell) for cell in column.cells] for column in self.columns), strict=True):
            name, *more = wrap(cells[0], widths[0]) or [""]
            yield Text(_line([name, *(cells[i] for i in shown[1:])], columns, widths, gap))
            yield from map(Text, more)
            for index in below:
                if cells[index]:
                    head = str(self.columns[index].header)
                    yield Padding(Text(f"{head}: {cells[index]}" if head else cells[index]), (0, 0, 0, 4))


def _widened(least: Sequence[int], natural: Sequence[int], spare: int) -> list[int]:
    """Return column widths between `least` and `natural` that use up `spare`.

    Each column grows in proportion to its missing width.
    """
    lacks = [most - size for size, most in zip(least, natural, strict=True)]
    share = min(1.0, spare / max(1, sum(lacks)))
    return [size + int(lack * share) for size, lack in zip(least, lacks, strict=True)]


def _line(cells: Sequence[str], columns: Sequence[Column], widths: Sequence[int], gap: int) -> str:
    placed = (
        cell.rjust(width) if column.justify == "right" else cell.ljust(width)
        for cell, column, width in zip(cells, columns, widths, strict=True)
    )
    return (" " * gap).join(placed).rstrip()


def _longest_word(column: Column) -> int:
    return max(
        map(cell_len, (word for cell in (column.header, *column.cells) for word in str(cell).split())), default=0
    )


def listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Listing:
    """Return a table whose first column is names.

    The columns numbered in `numbers` are aligned to the right.
    """
    right = set(numbers)
    table = Listing(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):  # Text: a name may hold brackets, which are markup to rich
        justify: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(Text(column), justify=justify, no_wrap=index == 0 or index in right)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def whole_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Iterable[int] = ()) -> Listing:
    """Return a listing of many columns, with little space between them."""
    table = listing(columns, rows, numbers=numbers)
    table.padding = _CLOSE_BY_ONE
    for column in table.columns:
        column.no_wrap = True
    return table


def yes(truth: bool) -> str:
    """Return the word `yes` in a table, or nothing."""
    return "yes" if truth else ""


def percent(part: float, whole: float) -> str:
    """Return `part` as a share of `whole`, as `44.8 %`."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def recomputed(flops: float, ops: int) -> str:
    """Return the recomputation in FLOPs, or as a number of ops.

    Ops are counted where they have no FLOPs, as in pooling and activation functions. The text is empty without ops.
    """
    if not ops:
        return ""
    return format_flops(flops) if flops else count(ops, "op")


def count(number: int, what: str) -> str:
    """Return a number with its noun, whose plural has an s: `68 ops`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_flops(flops: float) -> str:
    """Return `flops` for a reader, in decimal units: `3.2 GFLOP`."""
    power = 0
    while flops >= 1000 and power < len(_POWERS) - 1:
        flops /= 1000
        power += 1
    return f"{flops:.3g} {_POWERS[power]}FLOP"
