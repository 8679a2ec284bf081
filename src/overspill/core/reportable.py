"""Show a result as an HTML report, in a notebook and in a terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar


class Reportable:
    """Base of results that can be shown to a person."""

    _pages: ClassVar[Callable[[], Any]]
    """Returns the module that shows results; set by the package, because that module imports all of them."""

    def report(self, path: str | Path, title: str | None = None) -> None:
        """Write a report to `path`: one self-contained HTML page. Raises RequestError."""
        Reportable._pages().write_report(self, Path(path), title)

    def explain(self) -> str:
        """Return all of it as text, as the command prints it: the verdict, its figures, tables and notes."""
        return str(Reportable._pages().explained(self))

    def _repr_html_(self) -> str:
        """Return the verdict and its figures as HTML, for a notebook."""
        return str(Reportable._pages().in_notebook(self))

    def __str__(self) -> str:
        """Return the verdict and its figures as text, for a terminal."""
        return str(Reportable._pages().in_terminal(self))

    __repr__ = __str__  # all fields of a plan are a megabyte
