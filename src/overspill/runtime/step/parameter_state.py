"""One parameter's optimizer state, and a loan of the parameter to the optimizer for a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import is_
from typing import Any

from torch import Tensor, nn

from overspill.pytorch.storages import is_view, storage_key
from overspill.runtime.reachable import replace_in, tensors_in

from .from_host import as_on_host
from .host_updates import as_of_step
from .learned import Leaves, Needs, moves
from .residency import Residency, Resident, Spec


class ParameterState:
    """One parameter's state in the optimizer.

    `updates` are the OptimizerUpdates of its optimizer, and `needs` the memory that updates of the parameter take.
    `settings` are those of the group that decide which state exists.

    `content` is the state as the optimizer has it. It is empty until the optimizer makes it: at once, as Adagrad does,
    or at its first step. `leaves` are the tensors of the state that an update gets, by path, as in `Needs`. Those
    `parked` move too, but the present settings do not use them.
    """

    def __init__(
        self, updates: Any, name: str, parameter: nn.Parameter, group: dict[str, Any],
        content: dict[str, Any], residency: Residency,
    ) -> None:  # fmt: skip
        self.updates = updates
        self.name = name
        self.parameter = parameter
        self.group = group
        self.settings = updates.settings_of(group)
        self.needs = Needs({}, 0, 0, 0)
        self.leaves: Leaves = {}
        self.parked: Leaves = {}
        self.content = content
        self.residency = residency
        self.seen: tuple[Any, ...] = ()
        self.shown: tuple[Any, ...] = ()
        """The content's values when the user's optimizer got a guarded dictionary of them, and the values in that."""
        self.factors: tuple[float | Tensor, ...] = ()
        """What the gradient has to be multiplied by first, one factor after another."""
        self.outgrown = False
        """Whether the optimizer has made state that is not planned."""

    def divide(self, like: Tensor, before: ParameterState | None) -> None:
        """Find the tensors of the state that move, for a parameter as `like`; those of the state `before` may be away.

        Raises RequestError if the settings need state that does not exist.
        """
        self.needs = self.updates.needs_of(like, self.group, self.parameter)
        if before is not None and before.settings != self.settings:
            self.updates.check_state(self.group, like, self.content)
        known = {} if before is None else before.leaves | before.parked
        found = tensors_in(self.content)
        shared = {storage_key(t) for t in self.updates.kept_outside()} if found else set()
        there: Leaves = {}
        for path, tensor in found.items():
            if path in known and before is not None and before.resident(path).tensor is tensor:
                there[path] = known[path]
            elif moves(tensor, as_on_host(like) if self.residency.is_on_host(tensor) else like, shared):
                there[path] = (
                    tensor.dtype,
                    Spec.of(tensor) if tensor.shape != like.shape or not self.updates.groups else None,
                )
        wanted = self.needs.leaves
        if self.updates.groups:
            self.leaves = {path: there.get(path, leaf) for path, leaf in wanted.items()}
            self.parked = {path: leaf for path, leaf in there.items() if path not in wanted}
        else:
            self.leaves = there | {path: leaf for path, leaf in wanted.items() if path not in found}

    def paths(self) -> list[str]:
        """Return the paths of the tensors that move."""
        return [*self.leaves, *self.parked]

    def spec(self, path: str, parameter: Spec) -> Spec:
        """Return the spec of the moving tensor at `path`, if the spec of the parameter is `parameter`."""
        dtype, own = (self.leaves | self.parked)[path]
        return parameter.like(dtype) if own is None else replace(own, device=parameter.device)

    def is_as_seen(self) -> bool:
        """Return whether the content has the same values as the guarded dictionary of the user's optimizer."""
        return len(self.seen) == len(self.content) and all(map(is_, self.seen, self.content.values()))

    def residents(self) -> list[str]:
        """Return the names of the residents that move."""
        return [f"{self.name}.{path}" for path in self.paths()]

    def resident(self, path: str) -> Resident:
        """Return the resident of a leaf."""
        return self.residency[f"{self.name}.{path}"]

    def others(self) -> list[Tensor]:
        """Return the tensors of the state that do not move."""
        moving = {*self.paths()}
        return [tensor for path, tensor in tensors_in(self.content).items() if path not in moving]

    def rest_bytes(self, like: Tensor) -> int:
        """Return the bytes of the tensors that do not move, for a parameter as `like`, made or not."""
        return max(sum(tensor.nbytes for tensor in self.others()), self.updates.rest_bytes(like, self))

    def run(self, parameter: Tensor, gradient: Tensor, scale: Tensor | None, *state: Tensor) -> None:
        """Update `parameter` in place.

        `scale` multiplies its gradient. `state` has the order of `leaves`.
        """
        self.updates.update(self, parameter, self.multiplied(gradient), scale, *state)

    def multiplied(self, gradient: Tensor) -> Tensor:
        """Return the gradient multiplied by the factors of the step."""
        now = as_of_step()
        if now is None:
            for factor in self.factors:
                gradient.mul_(factor)
        else:  # in the store, where the loop may still have it
            for factor in now.factors.get(self.name, ()):
                gradient = gradient.mul(factor)
        return gradient


class Loan:
    """A whole parameter, lent to the optimizer in the user's own objects with its gradient and state, for one call."""

    def __init__(self, owned: ParameterState, parameter: Tensor, gradient: Tensor, state: Sequence[Tensor]) -> None:
        self.owned = owned
        self.data, self.gradient = parameter, gradient
        self._resident: Resident | None = None
        self.given = dict(zip(owned.leaves, state, strict=True))

    def begin(self) -> None:
        """Give the user's objects their data."""
        owned, parameter, state = self.owned, self.owned.parameter, self.owned.updates.optimizer.state
        self._resident = owned.residency.residents.get(owned.name)
        if self._resident is not None:
            self._resident.put(self.data)
        parameter.grad = self.gradient
        state.pop(parameter, None)
        owned.updates.hidden.pop(parameter, None)
        if owned.content:
            state[parameter] = owned.content
            for path in self.given.keys() & tensors_in(owned.content).keys():
                owned.resident(path).put(self.given[path])

    def end(self) -> None:
        """Take the data away again, and store it where it is planned."""
        owned, parameter = self.owned, self.owned.parameter
        parameter.grad = None
        if not _lies_in(parameter, self.data):
            self.data.copy_(parameter.data)
        if self._resident is not None:
            self._resident.take()
        content = owned.updates.optimizer.state.pop(parameter, None)
        owned.content = {} if content is None else content
        if content is not None and not content:  # an optimizer that only looks for state leaves an empty one
            owned.updates.hidden[parameter] = content
        self._take_state(tensors_in(owned.content))

    def _take_state(self, found: dict[str, Tensor]) -> None:
        owned, homes = self.owned, {storage_key(t): path for path, t in self.given.items()}
        # Copy what is new to where it is planned; first what lies where another tensor of the state belongs.
        apart = {path: t.clone() for path, t in found.items() if homes.get(storage_key(t), path) != path}
        placed = {
            path: t for path, t in found.items() if path in self.given and Spec.of(t) == Spec.of(self.given[path])
        }
        for path, tensor in placed.items():
            if not _lies_in(tensor, self.given[path]):
                self.given[path].copy_(apart.get(path, tensor))
        views = {path for path, tensor in placed.items() if is_view(tensor)}
        # Take the data from the tensors that were there before, which others may hold, then from the present ones.
        residents = {path: owned.resident(path) for path in self.given}
        for resident in residents.values():
            if not resident.away:
                resident.take()
        for path, given in self.given.items():
            # Not each is made yet, or as planned; and one that is a view would keep the memory that it is a view of.
            tensor = placed.get(path)
            residents[path].tensor = now = given.detach() if tensor is None or path in views else tensor
            if tensor is not None and now is not tensor:
                replace_in(owned.content, tensor, now)
            residents[path].put(given)
            residents[path].take()
        # The rest stays as it is, and what is large is planned for from the next step on.
        for path in found.keys() - placed.keys():
            if path in apart:
                found[path].data = apart[path]
            owned.outgrown = owned.outgrown or moves(found[path], owned.parameter, set())


def _lies_in(tensor: Tensor, home: Tensor) -> bool:
    return tensor.data_ptr() == home.data_ptr() and tensor.stride() == home.stride()
