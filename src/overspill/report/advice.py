"""Advice: its JSON object, and its page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.advice import Advice

from .page import Column, Page, Table, Unit, Verdict
from .tables import Cell


def advice_answer(advice: Advice) -> dict[str, Any]:
    """Return one piece of advice as `--json` prints it.

    A figure that was not computed is null.
    """
    return asdict(advice) | {"price": advice.price.name.lower()}


def advise_answer(
    request: dict[str, Any], made: Estimate, found: Sequence[Advice], left_out: Mapping[str, str], seconds: float
) -> dict[str, Any]:
    """Return the JSON object of `overspill advise`."""
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


def advise_page(made: Estimate, verdict: Verdict, found: Sequence[Advice], left_out: Mapping[str, str]) -> Page:
    """Return the page of the changes that help, with the `verdict` on the unchanged job.

    `left_out` maps each change that was tried without success to the reason.
    """
    as_it_is = ("as it is", made.minimum_capacity_bytes, made.total_bytes, made.fits(), None, None)
    explained = (
        "Needs: the smallest memory that the job survives on. Takes: what it has of a large one, with what PyTorch's "
        "allocator keeps. Both are estimates, and steps are simulated."
    )
    notes = [explained]
    for why in dict.fromkeys(left_out.values()):
        names = "; ".join(what for what in left_out if left_out[what] == why)
        notes.append(f"Tried and left out ({why}): {names}.")
    if not found:
        notes.append("Nothing that was tried makes it need less.")
    title = f"What {made.name} needs on {made.device.name}, and what takes less"
    return Page(title, Verdict(verdict.text, verdict.good), (changes_table(found, as_it_is),), tuple(notes))


def changes_table(found: Sequence[Advice], *first: tuple[Cell, ...]) -> Table:
    """Return the table of the changes that help, below the rows `first`."""
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
