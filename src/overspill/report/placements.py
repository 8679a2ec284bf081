"""Policies crossed with allocators and solvers, as JSON and tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from overspill.placement.packing import SOLVERS
from overspill.placement.place import Placed

from .tables import Cell, Column, Table, Unit

OVERALL = (
    Column("placed by"), Column("mean fragm.", Unit.SHARE), Column("worst", Unit.SHARE),
    Column("mean U_f", Unit.NUMBER),
    Column("time", Unit.NUMBER),
)  # fmt: skip
Crossing = tuple[str, Placed]
"""A policy, and how its schedule was placed."""


def placement_figures(crossings: Iterable[Crossing]) -> list[dict[str, Any]]:
    """Return the JSON objects of all crossings, one each."""
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


def placement_tables(crossings: Sequence[Crossing]) -> list[Table]:
    """Return memory above live bytes by policy, and each placer's overall results.

    A placer is an allocator or a solver.
    """
    if not crossings:
        return []
    found = {(policy, placed.placer): placed for policy, placed in crossings}
    policies, placers = (tuple(dict.fromkeys(names)) for names in zip(*found, strict=True))
    above = "Peak above the live bytes in %, by policy and by what places its blocks"
    columns = (Column("policy"), Column("live", Unit.BYTES), *(Column(placer, Unit.NUMBER) for placer in placers))
    rows = [
        (policy, found[policy, placers[0]].lower_bound_bytes, *(_over(found[policy, placer]) for placer in placers))
        for policy in policies
    ]
    note = (
        "live: the most bytes that live at once, which no placement undercuts. U_f: the mean share of free bytes in "
        "blocks too small for the largest request."
    )
    if any(placer in SOLVERS for placer in placers):
        note += " The last rows are solvers, which know all requests beforehand."
    overall = [_overall(placer, [placed for _, placed in crossings if placed.placer == placer]) for placer in placers]
    return [Table(above, columns, tuple(rows)), Table("Placed by each", OVERALL, tuple(overall), note)]


def _over(placed: Placed) -> str:
    """Return how far the peak is above the live bytes, in percent."""
    if not placed.lower_bound_bytes:
        return ""
    over = 100 * (placed.peak_bytes / placed.lower_bound_bytes - 1)
    return f"{over:.1f}" if over < 100 else f"{over:.0f}"


def _overall(placer: str, placed: Sequence[Placed]) -> tuple[Cell, ...]:
    unusable = [p.unusable for p in placed if p.unusable is not None]
    return (
        placer,
        sum(p.fragmentation for p in placed) / len(placed),
        max(p.fragmentation for p in placed),
        f"{sum(unusable) / len(unusable):.2f}" if unusable else None,
        f"{1e3 * sum(p.seconds for p in placed):.1f} ms",
    )
