"""A verdict and a table as short HTML for a notebook.

It sets only styles that suit both dark and light themes.
"""

from __future__ import annotations

from html import escape

from .page import Table, Unit, Verdict
from .page.encode import visible
from .tables import written

MOST_ROWS = 20
SIGNS = {True: "✓ ", False: "✕ ", None: ""}


def short_html(verdict: Verdict, table: Table | None = None) -> str:
    """Return the verdict, its figures, and the first rows of `table`."""
    parts = [f"<p><strong>{SIGNS[verdict.good]}{_safe(verdict.text)}</strong></p>"]
    if verdict.figures:
        rows = [(figure.label, figure.value, figure.note) for figure in verdict.figures]
        parts.append(_table([[_cell("td", text) for text in row] for row in rows]))
    if table is not None:
        # The table, or its first rows.
        head = [_cell("th", column.name, right=column.unit is not Unit.TEXT) for column in table.columns]
        units = [column.unit for column in table.columns]
        body = [
            [
                _cell("td", written(cell, unit), right=unit is not Unit.TEXT)
                for cell, unit in zip(row, units, strict=True)
            ]
            for row in table.rows[:MOST_ROWS]
        ]
        parts += [f"<p>{_safe(table.title)}</p>", _table([head, *body])]
        if len(table.rows) > MOST_ROWS:
            parts.append(f"<p>and {len(table.rows) - MOST_ROWS} more</p>")
    return f"<div>{''.join(parts)}</div>"


def _table(rows: list[list[str]]) -> str:
    return "<table>" + "".join(f"<tr>{''.join(row)}</tr>" for row in rows) + "</table>"


def _cell(tag: str, text: str, *, right: bool = False) -> str:
    return f'<{tag} style="text-align:{"right" if right else "left"}">{_safe(text)}</{tag}>'


def _safe(text: str) -> str:
    return escape(visible(text))
