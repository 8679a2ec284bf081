"""Advice as a JSON object, and as a table for a reader."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.advice import Advice
from overspill.estimation.text import verdict

from .tables import Cell, Column, Table, Unit, printed


def advice_answer(advice: Advice) -> dict[str, Any]:
    """One piece of advice as `--json` prints it.

    What was not worked out is null.
    """
    return asdict(advice) | {"price": advice.price.name.lower()}


def advise_answer(
    request: dict[str, Any], made: Estimate, found: Sequence[Advice], left_out: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """The JSON object of `overspill advise`."""
    return request | {
        "gpu": made.device.name,
        "capacity_bytes": made.device.memory_bytes,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "total_bytes": made.total_bytes,
        "fits": made.fits(),
        "changes": [advice_answer(advice) for advice in found],
        "left_out": dict(left_out),
        "seconds": seconds,
    }


def advise_report(made: Estimate, found: Sequence[Advice], left_out: Mapping[str, str]) -> RenderableType:
    """The verdict, and a table of the changes that help.

    `left_out` is what was tried in vain, and why.
    """
    fits = made.fits()
    # The job as it is, then the changes that help.
    table = printed(changes_table(found, ("as it is", made.minimum_capacity_bytes, made.total_bytes, fits, None, None)))
    table.columns[0].no_wrap = False
    parts: list[RenderableType] = [
        Text(verdict(made), style="bold green" if fits else "bold red"),
        "",
        table,
        "",
        Text(
            "Needs: the smallest memory that the job survives on. Takes: what it has of a large one, with what PyTorch's "
            "allocator keeps. Both are estimates, and steps are simulated."
        ),
    ]
    # What was tried without success.
    if left_out:
        for why in dict.fromkeys(left_out.values()):
            parts += [
                "",
                Text(f"Tried and left out ({why}): {'; '.join(what for what in left_out if left_out[what] == why)}."),
            ]
    if not found:
        parts.append(Text("Nothing that was tried makes it need less."))
    return Group(*parts)


def changes_table(found: Sequence[Advice], *first: tuple[Cell, ...]) -> Table:
    """The changes that help, below the rows that are `first`."""
    columns = (
        Column("change"), Column("needs", Unit.BYTES), Column("takes", Unit.BYTES), Column("fits"),
        Column("step", Unit.SECONDS), Column("cost"),
    )  # fmt: skip
    return Table("What would help, the cheapest first", columns, (*first, *map(_row, found)))


def _row(advice: Advice) -> tuple[Cell, ...]:
    host = "" if advice.host_bytes is None else f"; {format_bytes(advice.host_bytes)} of the host's memory"
    return (
        advice.what, advice.minimum_capacity_bytes, advice.total_bytes, advice.fits, advice.step_seconds,
        f"{advice.cost}{host}",
    )  # fmt: skip
