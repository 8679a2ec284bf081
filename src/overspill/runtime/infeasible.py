"""Complete the error for a budget that is too small: the graph it concerns, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from overspill.capture.compiled.graph import REST, UPDATE
from overspill.core.errors import InfeasibleBudgetError, OverspillError
from overspill.core.units import size_enough

AT_ONCE = "for their backward at once"
"""In the cause of an error, ends what several calls or graphs need together."""
# `core` does without torch, so the error gets this base where torch is there. It is a RuntimeError itself.
InfeasibleBudgetError.__bases__ = (OverspillError, torch.OutOfMemoryError)


def split_update(error: InfeasibleBudgetError) -> str:
    """Return help for a step by calls if its update takes the memory, or an empty string."""
    if f"at {UPDATE} of" not in error.cause:
        return ""
    return "; the optimizer's update takes it, which overspill.train_step (--whole-step) would split"


@contextmanager
def infeasible_for(
    what: str, inputs: Iterable[Any], *, whole_step: bool = False, stays: Callable[[], str] | None = None
) -> Iterator[None]:
    """Add to an InfeasibleBudgetError raised in the context its graph, its inputs, and what else would work.

    For a `whole_step` no alternative is named. `stays` returns why parameters stay on the device; it returns an empty
    string if they do not, and is None where they never move.
    """
    try:
        yield
    except InfeasibleBudgetError as error:
        shapes = ", ".join(str(tuple(i.shape)) for i in inputs if isinstance(i, Tensor)) or "no tensors"
        why = "" if stays is None else stays()
        instead = "" if whole_step or (stays is not None and not why) else split_update(error)
        if why:
            instead = f"; parameters stay on the device: {why}{instead}"
        if f"at {REST} of" in error.cause:
            instead = (
                "; the rest of it is set aside for the loss outside of the model: compute that inside, or say what it "
                "takes with reserve="
            )
        would_do = f'budget="{size_enough(error.floor_bytes)}" would do'
        if whole_step:
            would_do += " for steps on such inputs"
        elif AT_ONCE in error.cause:  # of which it has said that
            would_do = ""
        elif what == "training":
            would_do += ' if no other calls or graphs need room beside it (budget="smallest" finds enough for all)'
        raise error.with_help(f"{instead} (the {what} graph, on inputs of {shapes})", would_do) from None
