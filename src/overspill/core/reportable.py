"""What a result offers a person who looks at it: a report as a page of HTML, and itself in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

pages: Callable[[], Any]
"""Gives the module that knows how results look. It comes behind all results, so that the package hands it in."""


class Reportable:
    """A result that can be looked at."""

    def report(self, path: str | Path, title: str | None = None) -> None:
        """Write a report on this to `path`: one page of HTML that needs nothing else. Raises RequestError."""
        pages().write_report(self, Path(path), title)

    def _repr_html_(self) -> str:
        """The verdict and the figures behind it, for a notebook."""
        return str(pages().in_notebook(self))

    def __str__(self) -> str:
        """The verdict and the figures behind it, for a terminal; `repr` has all."""
        return str(pages().in_terminal(self))
