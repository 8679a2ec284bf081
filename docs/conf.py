"""The site: `make docs` builds it from the Markdown files of the repository as they are, and from docstrings.

A page of the site stands where a reader of the repository finds its file, so that links work in both.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import overspill
from overspill.cli import group

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Overspill"
version = release = overspill.__version__
copyright = "the authors of Overspill, Apache-2.0"  # noqa: A001 - Sphinx's name

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
include_patterns = [
    "docs/**",
    "bench/*.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "src/**/README.md",
    "native/**/README.md",
]
exclude_patterns = [".*", "build", "tests", "**/__pycache__"]
root_doc = "docs/index"
templates_path = ["_templates"]

highlight_language = "none"  # of a fence that names none: what a terminal shows
myst_heading_anchors = 4  # as on a code host
myst_enable_extensions = ["colon_fence"]
default_role = "literal"  # a single backtick in a docstring is code
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"Overspill {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_docs.html"}  # the site's address alone leads to docs/index.html


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _keep_colon, priority=400)  # before napoleon, which is at 500
    app.connect("source-read", _write_options)


def _write_options(_app: Sphinx, _name: str, source: list[str]) -> None:
    """Put the table of a command's options in the place of `<!-- options: COMMAND -->`."""
    source[0] = re.sub(r"<!-- options: (\w+) -->", lambda found: options(found[1]), source[0])


def options(command: str) -> str:
    """All options of `command`, as its --help-all has them: a table that opens at a click."""
    rows = []
    for parameter in group().commands[command].params:
        if parameter.param_type_name != "option":
            continue
        names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
        metavar = f" {parameter.metavar}" if parameter.metavar else ""
        told = re.sub(r"(?<![\w`])(--\w[\w-]*)", r"`\1`", parameter.help).replace("|", "\\|")
        rows.append(f"| {names}{metavar} | {told} |\n")
    head = f"<details><summary>All {len(rows)} options of {command}</summary>\n\n| option | meaning |\n|---|---|\n"
    return f"{head}{''.join(rows)}\n</details>"


def _keep_colon(_app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Break the first line of a property behind its colon: napoleon takes what stands before it for a type, unless a line ends there."""
    if what == "property" and lines and ": " in lines[0]:
        before, after = lines[0].split(": ", 1)
        lines[:1] = [f"{before}:", after]
