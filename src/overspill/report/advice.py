"""Advice: its JSON object, and its page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from overspill.core.units import format_bytes
from overspill.estimation import Estimate
from overspill.estimation.advice import Advice

from .page import Column, Page, PasteLine, Table, Unit, Verdict
from .tables import Cell

if TYPE_CHECKING:  # an estimate does without the runtime
    from overspill.runtime.advise import JobOnGpu

MOST_LINES = 3
"""The most changes whose lines are shown to paste."""


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
        "step_seconds": made.step_seconds(),
        "unsimulated": made.unsimulated,
        "changes": [advice_answer(advice) for advice in found],
        "left_out": dict(left_out),
        "seconds": seconds,
    }


def advise_page(made: Estimate, verdict: str, found: Sequence[Advice], left_out: Mapping[str, str]) -> Page:
    """Return the page of the changes that help, with the `verdict` on the unchanged job.

    `left_out` maps each change that was tried without success to the reason.
    """
    found, too_little = ranked(found)
    as_it_is = ("as it is", made.minimum_capacity_bytes, made.total_bytes, made.fits(), made.step_seconds(), None)
    explained = (
        "Needs: the smallest memory that the job survives on. Takes: what it has of a large one, with what PyTorch's "
        "allocator keeps. Both are estimates, and steps are simulated."
    )
    notes = [explained]
    for why in dict.fromkeys(left_out.values()):
        names = "; ".join(what for what in left_out if left_out[what] == why)
        notes.append(f"Tried and left out ({why}): {names}.")
    notes += [too_little] if too_little else []
    if not found:
        notes.append("Nothing that was tried makes it need less.")
    title = f"{made.titled} on {made.device.name}: what it needs, and what takes less"
    table = changes_table(found, as_it_is)
    lines: list[PasteLine] = []
    for advice in [advice for advice in found if advice.fits and (advice.trainer or advice.python)][:MOST_LINES]:
        lines += _lines(advice, "Or " * bool(lines))
    helped = () if made.fits() else tuple(lines)
    return Page(title, Verdict(verdict, made.fits()), (table,), tuple(notes), helped)


def _lines(advice: Advice, either: str) -> Iterator[PasteLine]:
    """Yield the lines that make the change, each below where it goes; `either` begins the first."""
    if not advice.python:
        yield PasteLine(advice.trainer, f"{either}{advice.what}, in Trainer:")
        return
    if advice.before:
        yield PasteLine(advice.before, f"{either}Overspill's plan. First of all, before CUDA is used:")
    plan = "Then" if advice.before else f"{either}Overspill's plan"
    where = "before" if advice.python.startswith("model = ") else "in place of the body of"
    model = ", the model on the CPU" if 'device="cuda"' in advice.python else ""
    yield PasteLine(advice.python, f"{plan}, {where} your training loop{model}:")
    if advice.trainer:
        yield PasteLine(advice.trainer, "The same in Trainer or TRL:")


def cards_page(made: Estimate, found: Sequence[JobOnGpu], then: Callable[[str], PasteLine]) -> Page:
    """Return the page of a job on several GPUs; `then` returns what to do next on one of them."""
    columns = (
        Column("GPU"), Column("memory", Unit.BYTES), Column("needs", Unit.BYTES), Column("fits"),
        Column("step", Unit.SECONDS), Column("largest batch", Unit.NUMBER),
    )  # fmt: skip
    rows = [
        (card.gpu, card.capacity_bytes, card.minimum_capacity_bytes, _fits(card), card.step_seconds, card.largest_batch)
        for card in found
    ]
    fitting = [card.gpu for card in found if card.fits]
    possible = fitting or [card.gpu for card in found if card.fits_planned]
    verdict = f"Fits {len(fitting)} of {len(found)} GPUs" + (f", the smallest is {fitting[0]}" if fitting else "")
    explained = (
        "Needs and the largest batch are estimated without a plan; the batch is interpolated between two traces. Steps "
        "are simulated without a plan, even where they do not fit. Perhaps planned: enough tensors may leave the GPU; "
        "`overspill plan` says at what cost."
    )
    table = Table("", columns, tuple(rows))
    return Page(made.titled, Verdict(verdict, bool(fitting)), (table,), (explained,), (*map(then, possible[:1]),))


def _fits(card: JobOnGpu) -> str:
    return "yes" if card.fits else "perhaps planned" if card.fits_planned else "no"


def ranked(found: Sequence[Advice]) -> tuple[list[Advice], str]:
    """Return the changes with which the job fits, the cheapest first, then those that may do, and a note on the rest.

    Where none is enough, it returns all. Each is `sized`.
    """
    rest = [advice for advice in found if advice.fits is False]
    if len(rest) == len(found):
        return [sized(advice) for advice in found], ""
    helpful = [sized(advice) for advice in found if advice.fits is not False]
    helpful.sort(key=lambda advice: (not advice.fits, advice.price, advice.step_seconds or math.inf))
    sizes = (f"{advice.what} ({format_bytes(advice.minimum_capacity_bytes or 0)})" for advice in rest)
    return helpful, f"Takes less, but not enough alone: {'; '.join(sizes)}." if rest else ""


def changes_table(found: Sequence[Advice], *first: tuple[Cell, ...]) -> Table:
    """Return the table of the changes that help, which are `ranked`, below the rows `first`."""
    columns = (
        Column("change"), Column("needs", Unit.BYTES), Column("takes", Unit.BYTES), Column("fits"),
        Column("step", Unit.SECONDS), Column("cost"),
    )  # fmt: skip
    return Table("What would help: what fits, by cost, then what may", columns, (*first, *map(_row, found)))


def _row(advice: Advice) -> tuple[Cell, ...]:
    host = "" if advice.host_bytes is None else f"; {format_bytes(advice.host_bytes)} of the host's memory"
    trainer = f"; in Trainer: {advice.trainer}" if advice.trainer else ""
    # A plan that is not made yet takes its budget.
    needed, taken = (nbytes or advice.budget_bytes for nbytes in (advice.minimum_capacity_bytes, advice.total_bytes))
    fits = "perhaps" if advice.fits is None else advice.fits
    return advice.what, needed, taken, fits, advice.step_seconds, f"{advice.cost}{host}{trainer}"


def sized(advice: Advice) -> Advice:
    """Return advice to call Overspill with its budget in place of an ellipsis."""
    if advice.budget_bytes is None:
        return advice
    rounded = -(-advice.budget_bytes >> 20)

    def filled(text: str) -> str:
        return text.replace("budget=…", f'budget="{rounded}MiB"').replace("Budget(…)", f'Budget("{rounded}MiB")')

    return replace(advice, what=filled(advice.what), trainer=filled(advice.trainer), python=filled(advice.python))
