"""A table as data, which a terminal, a notebook and a page show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from overspill.core.units import format_bytes, format_seconds

from .listing import format_flops, percent, yes

Cell = str | float | bool | None
"""The content of a table's cell. None: unknown."""


class Unit(StrEnum):
    """The form in which a number is written."""

    TEXT = "text"
    NUMBER = "number"
    BYTES = "bytes"
    SECONDS = "seconds"
    FLOPS = "flops"
    RATIO = "ratio"  # 1.095
    SHARE = "share"  # 0.45 is written as 45 %


@dataclass(frozen=True)
class Column:
    """A column of a table, with its unit."""

    name: str
    unit: Unit = Unit.TEXT
    bar: bool = False
    """Whether each number has a bar behind it, as long as its share of the largest."""
    short: str = ""
    """The column's name in a terminal."""


@dataclass(frozen=True)
class Table:
    """A table. On a page a click on a column's head sorts it; rows are as given until then."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    first: int | None = None
    """How many rows a terminal shows; None: all."""


WRITERS: dict[Unit, Callable[[float], str]] = {
    Unit.TEXT: str,
    Unit.NUMBER: "{:g}".format,
    Unit.BYTES: format_bytes,
    Unit.SECONDS: format_seconds,
    Unit.FLOPS: format_flops,
    Unit.RATIO: "{:.3f}".format,
    Unit.SHARE: lambda share: percent(share, 1),
}


def written(cell: Cell, unit: Unit) -> str:
    """Return a cell as text, in its unit."""
    if cell is None or isinstance(cell, str):
        return cell or ""
    if isinstance(cell, bool):
        return yes(cell) or "no"
    return WRITERS[unit](cell)
