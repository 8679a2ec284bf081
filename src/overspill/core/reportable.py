"""What a result offers a person who looks at it: a report as a page of HTML, and itself in a notebook."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar


class Reportable:
    """A result that can be looked at."""

    _pages: ClassVar[Callable[[], Any]]
    """Gives the module that knows how results look; it comes behind all of them, so that the package hands it in."""

    def report(self, path: str | Path, title: str | None = None) -> None:
        """Write a report on this to `path`: one page of HTML that needs nothing else. Raises RequestError."""
        Reportable._pages().write_report(self, Path(path), title)

    def _repr_html_(self) -> str:
        """The verdict and the figures behind it, for a notebook."""
        return str(Reportable._pages().in_notebook(self))

    def __str__(self) -> str:
        """The verdict and the figures behind it, for a terminal; `repr` has all."""
        return str(Reportable._pages().in_terminal(self))
