"""The papers' plots with Overspill's figures, for a page.

A paper's text has few of its bars, and those are claims with rows of their own. The others can only be read off its
plots, so the plots here have our figures alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from overspill_papers.papers import plain_place
from overspill_papers.papers.lab import MIB, Lab

Curve = Mapping[str, float] | Mapping[float, float]
"""The value at each point of the axis, which is a name or a number."""


@dataclass(frozen=True)
class PaperFigure:
    """A plot of a paper."""

    where: str
    title: str
    x_axis: str
    y_axis: str
    compute: Callable[[Lab], Mapping[str, Curve]]
    """Returns its curves by name."""
    lines: bool = False
    """Whether curves are drawn as lines; otherwise as adjacent bars."""


def in_parts(found: Mapping[str, Mapping[str, int]]) -> Mapping[str, Curve]:
    """Return stacked curves in MB, one for each part.

    `found` has several things, each divided into the same parts, in bytes.
    """
    parts = next(iter(found.values()))
    return {part: {name: of[part] / MIB for name, of in found.items()} for part in parts}


def figures_of(paper: str, where: str | None = None) -> tuple[PaperFigure, ...]:
    """Return the plots of the paper of this name, or those of one place.

    The tuple is empty where all plotted figures have rows.
    """
    name = f"{__name__}.{paper}"
    if find_spec(name) is None:
        return ()
    found: tuple[PaperFigure, ...] = importlib.import_module(name).FIGURES
    return tuple(figure for figure in found if where is None or plain_place(figure.where) == plain_place(where))
