"""One call of a train step: running, abandoned or dropped."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from overspill.core.errors import OverspillError, StoreError, is_out_of_memory
from overspill.pytorch.dispatch import disable_current_modes, no_python_dispatcher
from overspill.runtime.driver import ProgramRun
from overspill.runtime.transfer.engine import first_line

from .in_arena import leave
from .plans import Compiled, StepPlans
from .residency import readable
from .state import StepState

UNFINISHED = (
    "the step is unfinished and nothing is lost: when the cause is gone, call it again with the same inputs, "
    "or its resume(); its abandon() gives the step up"
)
NOTHING_RAN = (
    "overspill: the step was being captured, and nothing has run: buffers that forward moves and the random generator "
    "are as before"
)
LOST = "the step cannot be finished: {} was stopped half-way; call its abandon(), and load a checkpoint"
_LOG = logging.getLogger("overspill")


@dataclass
class StepCall:
    """One call of the step and its progress."""

    inputs: tuple[Any, ...]
    parts: list[tuple[Any, ...]]
    """Inputs of each micro-batch."""
    number: int = 0
    """The micro-batch that runs or runs next."""
    loss: Tensor | None = None
    """Sum of the losses of the micro-batches before."""
    returned: Any = None
    """The value for the caller, if the loss function returns more than a loss."""
    last: Compiled | None = None
    """The plan of the last round, if micro-batches run beside one another."""
    compiled: Compiled | None = None
    run: ProgramRun | None = None
    """The run of micro-batch `number`, once it has begun."""
    drawn: Any = None
    """The state of the random generators before a run that may begin again."""

    @property
    def is_done(self) -> bool:
        """Whether no micro-batch is left."""
        return self.number == len(self.parts)

    @property
    def advice(self) -> str:
        """Advice to the user about this call after an error."""
        return LOST.format(self.run.lost) if self.run is not None and self.run.lost else UNFINISHED

    def moved(self) -> str:
        """Return the name of the tensor that the failed instruction moves, as the start of a message."""
        if self.run is None or self.compiled is None:
            return ""
        position, name = self.run.where()
        if position is not None:
            name = readable(self.compiled.names[dict(self.compiled.stretch.residents())[position]])
        return f"{name}: " if name else ""


class Underway:
    """The call that is running, if any.

    State and plans read this object because they must not hold the step itself.
    """

    def __init__(self) -> None:
        self.call: StepCall | None = None

    def advice(self) -> str:
        """Return a message for reads of parameters during a run, or an empty string."""
        return self.call.advice if self.call is not None and self.call.run is not None else ""

    def add_up(self, total: Tensor, gradient: Tensor) -> None:
        """Add the gradient of a micro-batch to the sum; the first micro-batch starts it."""
        if self.call is not None and self.call.number == 0:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def stopped(self, error: BaseException, state: StepState) -> None:
        """Keep the call as unfinished after an error, or undo it.

        The call is kept if it can go on, or has changed too much to go back.
        """
        call = self.call
        assert call is not None
        run, is_short = call.run, is_out_of_memory(error)
        passes = isinstance(error, (StoreError, KeyboardInterrupt)) or is_short
        if not ((call.number or run) and (passes or (run and run.changed))):
            if run is None and isinstance(error, Exception) and not (passes or isinstance(error, OverspillError)):
                error.add_note(NOTHING_RAN)
            self.abandon(state)
        elif isinstance(error, StoreError):
            raise StoreError(f"{call.moved()}{error}; {UNFINISHED}") from error
        elif is_short and state.where.type == "cpu" and not (run and run.lost):
            at = "" if run is None else f" in {run.op()}"
            raise StoreError(f"out of host memory{at}; {UNFINISHED}") from error
        else:
            error.add_note(f"overspill: {call.advice}")

    def abandon(self, state: StepState) -> None:
        """Give up the call: return its tensors to `state` as they are now, outside the arena."""
        call, self.call = self.call, None
        if call is None:
            return
        # Residents get back the tensor or the handle that the run has of them.
        if call.run is not None and call.compiled is not None:
            in_arena = call.compiled.plan.places is not None
            call.compiled.borrowed(state.residency).take_back(call.run, state.engine, as_copies=in_arena)
        for updates in state.updates:
            updates.finish()
        state.forget_sums()
        state.arm()


def let_go(state: StepState, plans: StepPlans, hooks: Sequence[RemovableHandle]) -> None:
    """Remove the guards, drop the plans and release the store.

    Bytes that are only in the store are lost.
    """
    state.release()
    for hook in hooks:
        hook.remove()
    plans.clear()
    state.forget_sums()
    give_back_arena(state, plans)
    if state.engine is not None:
        state.engine.close()
        state.engine = None


def give_back_arena(state: StepState, plans: StepPlans) -> None:
    """Free the arena of the step; tensors in it get memory of their own. Raises StoreError."""
    if state.engine is not None:
        leave(state.residency, plans.arena, state.engine, state.where)


def dropped(underway: Underway, state: StepState, plans: StepPlans, hooks: Sequence[RemovableHandle]) -> None:
    """Bring tensors back and release everything after the step was garbage collected.

    Tensors come back only if the model or an optimizer still exists.
    """
    if not state.gate.is_forked:  # in a child the guards stay, to say what cannot be read there
        state.gate.alone_or_later(lambda: _dropped(underway, state, plans, hooks))


def _dropped(underway: Underway, state: StepState, plans: StepPlans, hooks: Sequence[RemovableHandle]) -> None:
    owners = [weakref.ref(state.module.model), *map(weakref.ref, state.optimizers)]
    try:
        # A collection may come in the middle of another model's trace, of which these tensors are no part.
        with disable_current_modes(), no_python_dispatcher():
            try:
                underway.abandon(state)
                plans.clear()
                state.disown()
                if any(owner() is not None for owner in owners):
                    state.synchronize()
            finally:
                let_go(state, plans, hooks)
    except (OverspillError, RuntimeError) as error:  # the store's, or the device's: there is no caller to raise it to
        _LOG.warning(
            "a train step was dropped and could not bring everything back; what is lost reads as NaN: %s",
            first_line(error),
        )
