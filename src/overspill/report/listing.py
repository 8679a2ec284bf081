"""Plain tables: of names and what they stand for, and of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from rich import box
from rich.table import Table
from rich.text import Text

_POWERS = ("", "k", "M", "G", "T", "P")


def listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = ()) -> Table:
    """A table whose first column names things; the columns numbered in `numbers` are aligned to the right."""
    right = set(numbers)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):  # Text: a name may hold brackets, which are markup to rich
        justify: Literal["left", "right"] = "right" if index in right else "left"
        table.add_column(Text(column), justify=justify, no_wrap=index == 0 or index in right)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def whole_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: Iterable[int] = ()) -> Table:
    """A listing with many columns, close together: a narrow terminal loses the last ones, not a part of each."""
    table = listing(columns, rows, numbers=numbers)
    table.padding = (0, 0, 0, 1)
    for index, column in enumerate(table.columns):
        column.min_width, column.no_wrap = max(len(row[index]) for row in (columns, *rows)), True
    return table


def yes(truth: bool) -> str:
    """A tick in a table, or nothing."""
    return "yes" if truth else ""


def percent(part: float, whole: float) -> str:
    """`part` as a share of `whole`: `44.8 %`."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def format_flops(flops: float) -> str:
    """`flops` for a reader, in decimal units: `3.2 GFLOP`."""
    power = 0
    while flops >= 1000 and power < len(_POWERS) - 1:
        flops /= 1000
        power += 1
    return f"{flops:.3g} {_POWERS[power]}FLOP"
