"""What a result offers a person who looks at it: a report as a page of HTML, and itself in a notebook."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any


class Reportable:
    """A result that can be looked at. How it looks is known by `report/`, which comes behind all results: found when asked."""

    def report(self, path: str | Path, title: str | None = None) -> None:
        """Write a report on this to `path`: one page of HTML that needs nothing else. Raises RequestError."""
        _pages().write_report(self, Path(path), title)

    def _repr_html_(self) -> str:
        """The verdict and the figures behind it, for a notebook."""
        return str(_pages().in_notebook(self))

    def __str__(self) -> str:
        """The verdict and the figures behind it, for a terminal; `repr` has all."""
        return str(_pages().in_terminal(self))


def _pages() -> Any:
    return import_module("overspill.report.pages.results")
