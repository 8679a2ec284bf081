"""Write a page as one HTML file, with style, script and content.

The file loads nothing from the network or from other files.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from overspill.core.errors import RequestError
from overspill.core.files import write_whole

from .encode import encode, visible
from .sections import Page

SCRIPTS = (
    "base.js", "charts.js", "lines.js", "step_model.js", "sheet.js", "memory_view.js", "stream_view.js",
    "address_view.js",
    "tree.js", "step.js", "main.js",
)  # fmt: skip
"""The scripts in the order of their dependencies; joined, they are one function."""


def check_page(path: Path) -> None:
    """Raise RequestError, before any work, if `path` is no HTML name."""
    if path.suffix.lower() not in {".html", ".htm"}:
        raise RequestError(f"cannot write a report to {path}: the file must end in .html")


def write_page(path: Path, page: Page) -> None:
    """Write `page` to `path`. Raises RequestError if that fails."""
    check_page(path)
    write_whole(path, page_text(page))


def page_text(page: Page) -> str:
    """Return `page` as HTML."""
    web = files(__package__) / "web"
    script = "\n".join((web / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return Template((web / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(visible(page.title)),
        style=(web / "page.css").read_text(encoding="utf-8"),
        script=f'"use strict";\n(() => {{\n{script}\n}})();',
        content=encode(page),
    )
