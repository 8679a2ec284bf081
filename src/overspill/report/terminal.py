"""A result in a terminal: the verdict, the tables and the notes of its page. Charts and views are on the page alone."""

from __future__ import annotations

from io import StringIO

from rich.console import Console, Group, RenderableType
from rich.text import Text

from .listing import Listing, listing, whole_columns
from .page.sections import Page, PasteLine
from .tables import Table, Unit, written

TONES = {True: "bold green", False: "bold red", None: "bold"}
BAR_LETTERS, EIGHTHS = 32, " ▏▎▍▌▋▊▉"
MOST_BESIDE_BARS = 4
"""The most columns of a table whose bars a terminal shows too."""
LONG_NAME = 40
"""Only longer names and figures are wrapped."""


def in_terminal(page: Page, *saved: str, brief: bool = False) -> RenderableType:
    """Return `page` for a terminal, followed by a line for each of `saved`; if `brief`, without tables and notes."""
    verdict = page.verdict
    parts: list[RenderableType] = [Text(page.title), "", Text(verdict.text, style=TONES[verdict.good])]
    if verdict.figures:
        figures = listing(("", "", ""), [(f"  {f.label}", f.value, f.note) for f in verdict.figures])
        figures.show_header = False
        figures.columns[1].no_wrap = all(len(f.value) <= LONG_NAME for f in verdict.figures)
        parts += ["", figures]
    for table in () if brief else page.tables:
        if table.rows:
            parts += ["", *([Text(table.title, style="bold")] if table.title else []), printed(table), *_below(table)]
    below = (*(() if brief else page.notes), *saved)
    parts += [*([""] if below else []), *map(Text, below)]
    if page.next:
        parts += ["", Text("What to do next", style="bold")]
        # A line to paste is one line, whatever the width.
        parts += [Text(f"  {text}", no_wrap=True, overflow="ignore") for line in page.next for text in _pasted(line)]
    return Group(*parts)


def _pasted(line: PasteLine) -> tuple[str, str]:
    return f"# {line.why}", line.text


def as_text(page: Page) -> str:
    """Return `page` as a terminal of 120 columns shows it, without colours."""
    text = StringIO()
    Console(width=120, file=text, color_system=None, highlight=False).print(in_terminal(page), crop=False)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def printed(table: Table) -> Listing:
    """Return the rows of `table` that a terminal shows, without its title.

    Many columns have little space between them.
    """
    units = [column.unit for column in table.columns]
    columns = [column.short or column.name for column in table.columns]
    rows = [[written(cell, unit) for cell, unit in zip(row, units, strict=True)] for row in table.rows[: table.first]]
    bars = [at for at, column in enumerate(table.columns) if column.bar]
    if len(bars) == 1 and len(columns) <= MOST_BESIDE_BARS:
        # The bar stands behind its number.
        at = bars[0] + 1
        sizes = [row[bars[0]] for row in table.rows]
        most = max((size for size in sizes if isinstance(size, (int, float))), default=0)
        columns.insert(at, "")
        units.insert(at, Unit.TEXT)
        for row, size in zip(rows, sizes, strict=False):
            row.insert(at, bar(size / most) if most and isinstance(size, (int, float)) else "")
    numbers = [at for at, unit in enumerate(units) if unit is not Unit.TEXT]
    made = (whole_columns if len(columns) > 2 * MOST_BESIDE_BARS else listing)(columns, rows, numbers=numbers)
    made.columns[0].no_wrap = all(len(row[0]) <= LONG_NAME for row in rows)
    return made


def bar(share: float) -> str:
    """Return a bar of at most 32 characters, in eighths of a character."""
    eighths = round(share * BAR_LETTERS * 8)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def _below(table: Table) -> list[Text]:
    """Return how many rows are left out, and the table's note."""
    left = 0 if table.first is None else len(table.rows) - table.first
    return [Text(line) for line in (f"and {left} more" if left > 0 else "", table.note) if line]
