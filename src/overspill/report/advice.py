"""Advice as a JSON object, and as a table for a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from overspill.core.units import format_bytes, format_seconds
from overspill.estimation import Estimate
from overspill.estimation.advice import Advice
from overspill.estimation.text import verdict

from .listing import listing, yes

_COLUMNS = ("change", "needs", "takes", "fits", "step", "cost")


def advice_answer(advice: Advice) -> dict[str, Any]:
    """One piece of advice as `--json` prints it.

    What was not worked out is null.
    """
    return asdict(advice) | {"price": advice.price.name.lower()}


def advise_answer(
    request: dict[str, Any], made: Estimate, found: Sequence[Advice], left_out: Sequence[str], seconds: float
) -> dict[str, Any]:
    """The JSON object of `overspill advise`."""
    return request | {
        "gpu": made.device.name,
        "capacity_bytes": made.device.memory_bytes,
        "minimum_capacity_bytes": made.minimum_capacity_bytes,
        "total_bytes": made.total_bytes,
        "fits": made.fits(),
        "changes": [advice_answer(advice) for advice in found],
        "left_out": list(left_out),
        "seconds": seconds,
    }


def advise_report(made: Estimate, found: Sequence[Advice], left_out: Sequence[str]) -> RenderableType:
    """The verdict, and a table of the changes that help.

    `left_out` is what was tried in vain.
    """
    fits = made.fits()
    # The job as it is, then the changes that help.
    rows = [("as it is", *_bytes(made.minimum_capacity_bytes, made.total_bytes), yes(fits) or "no", "", "")]
    rows += [_row(advice) for advice in found]
    table = listing(_COLUMNS, rows, numbers=(1, 2, 4))
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
        tried = "; ".join(left_out)
        parts += ["", Text(f"Tried and left out, as it saves less than one percent or cannot be done here: {tried}.")]
    if not found:
        parts.append(Text("Nothing that was tried makes it need less."))
    return Group(*parts)


def _row(advice: Advice) -> tuple[str, ...]:
    step = "" if advice.step_seconds is None else format_seconds(advice.step_seconds)
    fits = "" if advice.fits is None else yes(advice.fits) or "no"
    host = "" if advice.host_bytes is None else f"; {format_bytes(advice.host_bytes)} of the host's memory"
    return (
        advice.what, *_bytes(advice.minimum_capacity_bytes, advice.total_bytes), fits, step, f"{advice.cost}{host}",
    )  # fmt: skip


def _bytes(*sizes: int | None) -> tuple[str, ...]:
    return tuple("" if nbytes is None else format_bytes(nbytes) for nbytes in sizes)
