"""Policies crossed with allocators and solvers, as JSON and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from overspill.core.units import format_bytes
from overspill.placement.packing import SOLVERS
from overspill.placement.place import Placed

from .listing import listing, percent, whole_columns

Crossing = tuple[str, Placed]
"""A policy, and how its schedule was placed."""


def placement_figures(crossings: Iterable[Crossing]) -> list[dict[str, Any]]:
    """The JSON objects of all crossings, one each."""
    return [
        {
            "policy": policy,
            "placer": placed.placer,
            "peak_bytes": placed.peak_bytes,
            "lower_bound_bytes": placed.lower_bound_bytes,
            "fragmentation": placed.fragmentation,
            "unusable": placed.unusable,
            "seconds": placed.seconds,
        }
        for policy, placed in crossings
    ]


def placement_report(crossings: Sequence[Crossing], placers: Sequence[str]) -> RenderableType:
    """Memory above live bytes by policy, and each placer's overall results.

    Two tables; a placer is an allocator or a solver.
    """
    return Group(
        Text("Peak above the live bytes in %, by policy and by what places its blocks:"),
        "",
        _by_policy(crossings, placers),
        "",
        _by_placer(crossings, placers),
        "",
        Text(
            "live: the most bytes that live at once, which no placement undercuts. U_f: the mean share of free bytes in "
            "blocks too small for the largest request. The last rows are solvers, which know all requests beforehand."
            if any(p in SOLVERS for p in placers)
            else "live: the most bytes that live at once, which no placement undercuts."
        ),
    )


def _by_policy(crossings: Sequence[Crossing], placers: Sequence[str]) -> Table:
    found = {(policy, placed.placer): placed for policy, placed in crossings}
    rows = []
    for policy in dict.fromkeys(policy for policy, _ in crossings):
        here = [found[policy, placer] for placer in placers]
        rows.append((policy, format_bytes(here[0].lower_bound_bytes), *map(_over, here)))
    return whole_columns(("policy", "live", *placers), rows, numbers=range(1, 2 + len(placers)))


def _over(placed: Placed) -> str:
    """How far the peak is above the live bytes, in percent."""
    if not placed.lower_bound_bytes:
        return ""
    over = 100 * (placed.peak_bytes / placed.lower_bound_bytes - 1)
    return f"{over:.1f}" if over < 100 else f"{over:.0f}"


def _by_placer(crossings: Sequence[Crossing], placers: Sequence[str]) -> Table:
    rows = []
    for placer in placers:
        here = [placed for _, placed in crossings if placed.placer == placer]
        unusable = [p.unusable for p in here if p.unusable is not None]
        rows.append(
            (
                placer,
                percent(sum(p.fragmentation for p in here) / len(here), 1),
                percent(max(p.fragmentation for p in here), 1),
                f"{sum(unusable) / len(unusable):.2f}" if unusable else "",
                f"{1e3 * sum(p.seconds for p in here):.1f} ms",
            )
        )
    return listing(("placed by", "mean fragm.", "worst", "mean U_f", "time"), rows, numbers=range(1, 5))
