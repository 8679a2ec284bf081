"""The papers' plots, as we find them, for a page.

Next to the figures that a paper gives in words. A paper's text has few of its bars, and those are claims with rows of
their own. The others can only be read off its plots, so here are ours alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

from overspill_papers.papers import plain_place
from overspill_papers.papers.lab import MIB, Lab

Curve = Mapping[str, float] | Mapping[float, float]
"""From what is along the axis, a name or a number, to the value there."""


@dataclass(frozen=True)
class PaperFigure:
    """A plot of a paper.

    `compute` gives its curves by name; `lines` draws them so, else as adjacent bars.
    """

    where: str
    title: str
    x_axis: str
    y_axis: str
    compute: Callable[[Lab], Mapping[str, Curve]]
    lines: bool = False


def in_parts(found: Mapping[str, Mapping[str, int]]) -> Mapping[str, Curve]:
    """Stacked curves in MB, one for each part.

    Of several things, each of the same parts in bytes.
    """
    parts = next(iter(found.values()))
    return {part: {name: of[part] / MIB for name, of in found.items()} for part in parts}


def figures_of(paper: str, where: str | None = None) -> tuple[PaperFigure, ...]:
    """The plots of the paper of this name.

    Or those of one place; none where all that it draws has rows.
    """
    name = f"{__name__}.{paper}"
    if find_spec(name) is None:
        return ()
    found: tuple[PaperFigure, ...] = importlib.import_module(name).FIGURES
    return tuple(figure for figure in found if where is None or plain_place(figure.where) == plain_place(where))
