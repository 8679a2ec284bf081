"""Plain tables: of names and what they stand for, and of figures."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.table import Table
from rich.text import Text


def listing(columns: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = (), title: str | None = None) -> Table:
    """A table whose first column names things; the columns numbered in `numbers` are aligned to the right."""
    right = set(numbers)
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", no_wrap=index == 0 or index in right)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a name may hold brackets, which are markup to rich
    return table


def yes(truth: bool) -> str:
    """A tick in a table, or nothing."""
    return "yes" if truth else ""


def percent(part: float, whole: float) -> str:
    """`part` as a share of `whole`: `44.8 %`."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def format_flops(flops: float) -> str:
    """`flops` for a reader, in decimal units: `3.2 GFLOP`."""
    for unit in ("", "k", "M", "G", "T"):
        if flops < 1000:
            break
        flops /= 1000
    else:
        unit = "P"
    return f"{flops:.3g} {unit}FLOP"
