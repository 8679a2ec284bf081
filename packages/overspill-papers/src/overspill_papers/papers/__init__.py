"""The papers: their measurements as data, and code for Overspill's figures."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean

from .claim import SCALES as SCALES
from .claim import TOLERANCE as TOLERANCE
from .claim import Claim as Claim
from .claim import Counts as Counts
from .claim import Result as Result
from .claim import results as results
from .lab import Lab as Lab
from .workers import Workers as Workers


@dataclass(frozen=True)
class Paper:
    """A paper.

    A figure needs its mechanism if it changes with a replacement of the mechanism.
    """

    name: str
    """The name that a user gives, and the module here that holds its claims."""
    title: str
    machine: str
    aliases: tuple[str, ...]
    without: str
    """The replacement of its mechanism, in words."""
    instead: Mapping[str, str]
    """The replacement of its mechanism, by name."""


PAPERS = (
    Paper(
        "vdnn",
        "vDNN, Rhu et al., MICRO 2016",
        "titan-x",
        ("vdnn-micro16", "micro16"),
        "with nothing offloaded",
        dict.fromkeys(("vdnn-all", "vdnn-conv", "vdnn-dynamic"), "liveness"),
    ),
    Paper(
        "dymem",
        "Dymem, Yang and Cheng, HPDC 2020",
        "titan-x",
        ("dymem-hpdc20", "hpdc20"),
        "with vdnn-all in the place of dymem",
        {"dymem": "vdnn-all"},
    ),
    Paper(
        "window",
        "Adaptive window with virtual addressing, under review 2020",
        "v100-nvlink, p100-nvlink",
        ("adaptive-window", "adaptive-window-virtual-addressing"),
        "with no swap",
        {"window": "liveness", "lms": "liveness"},
    ),
    Paper(
        "placement",
        "Profile-guided memory optimization, Sekiyama et al., 2018",
        "p100-nvlink",
        ("profile-guided", "profile-guided-placement"),
        "in Chainer's own pool",
        {"skyline": "chainer", "mip": "chainer"},
    ),
    Paper(
        "dnnmem",
        "DNNMem, Gao et al., ESEC/FSE 2020",
        "p40",
        ("dnnmem-fse20", "fse20"),
        "by Shape Inference",
        {"estimate": "shape-inference"},
    ),
)
_BY_NAME = {name: paper for paper in PAPERS for name in (paper.name, *paper.aliases)}


def paper_named(name: str) -> Paper:
    """Return the paper of this name or alias. Raises RequestError with the names that exist."""
    if (paper := _BY_NAME.get(name.lower())) is not None:
        return paper
    raise RequestError(
        "unknown paper "
        f"{name!r}{did_you_mean(name, _BY_NAME, shown_as={alias: paper.name for alias, paper in _BY_NAME.items()})} "
        f"Papers: {', '.join(paper.name for paper in PAPERS)}"
    )


def claims_of(paper: Paper, table: str | None = None) -> tuple[Claim, ...]:
    """Return all claims of `paper`, or of one table or figure. Raises RequestError with the names that exist."""
    claims: tuple[Claim, ...] = importlib.import_module(f"{__name__}.{paper.name}").CLAIMS
    if table is None:
        return claims
    found = tuple(claim for claim in claims if plain_place(claim.where) == plain_place(table))
    if not found:
        places = ", ".join(dict.fromkeys(claim.where for claim in claims))
        raise RequestError(f"{paper.name} has nothing of {table!r}. Tables and figures: {places}")
    return found


def plain_place(where: str) -> str:
    """Return one spelling for `Fig. 11`, `fig11` and `figure 11`."""
    letters = "".join(c for c in where.lower() if c.isalnum())
    return letters.replace("figure", "fig").replace("tab", "table").replace("tablele", "table")
