"""Optimizers that a user's loop has around a compiled model: their updates, and which of them share parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.optim import Optimizer

from overspill.runtime.step.updates import OptimizerUpdates


class LoopUpdates(OptimizerUpdates):
    """Updates by an optimizer that the user's loop has, and that goes when the loop drops it."""

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Raises RuntimeError if it is gone."""
        if (found := self._optimizer()) is None:
            raise RuntimeError("the optimizer is gone")
        return found

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)

    def is_of(self, optimizer: Optimizer) -> bool:
        """Return whether these are the updates by `optimizer`."""
        return self._optimizer() is optimizer

    @property
    def is_alive(self) -> bool:
        """Whether the loop still has it."""
        return self._optimizer() is not None


def in_order(optimizer: Optimizer) -> None:
    """Put the state of parameters in the order of these, as a step on all of them makes it."""
    state = optimizer.state
    wanted = {id(p): p for group in optimizer.param_groups for p in group["params"] if p in state}
    if [id(key) for key in state][: len(wanted)] != [*wanted]:
        found = {p: state[p] for p in wanted.values()}
        found |= {key: value for key, value in state.items() if id(key) not in wanted}
        state.clear()
        state.update(found)


def have_in_common(one: Optimizer, other: Optimizer) -> bool:
    """Return whether two optimizers have a parameter in common."""
    own = {id(p) for group in one.param_groups for p in group["params"]}
    return any(id(p) in own for group in other.param_groups for p in group["params"])


def apart(optimizers: Iterable[Optimizer]) -> list[Optimizer]:
    """Return the optimizers, of those with a parameter in common the last: an earlier one may be of a run before."""
    found: list[Optimizer] = []
    for optimizer in optimizers:
        found = [other for other in found if not have_in_common(other, optimizer)] + [optimizer]
    return found
