"""Bound the rows that a model chooses by values (experts by `nonzero()`) in code that torch.compile does not trace.

Such code runs as it is between planned graphs. What it keeps and takes grows with the rows that its ops choose, which
are known before that memory is taken. So plans set aside memory for a bound, a quarter more than the first step chose.
A call that chooses more, for which plans have no room, ends there; it is undone, plans are made for a larger bound, and
it begins again.

Known limits:

- The memory is taken to be at most proportional to the rows. If it is more, `plan_check.py` counts the step.
- Rows by numbers that the code reads itself (`.item()`, `tolist()`) are not seen, nor those without gradients.
- A call that begins again has its tensors and random generators as before; other Python values that forward changes,
  and hooks, see both.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from math import ceil
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from overspill.capture.compiled.chosen_rows import GROUPED
from overspill.core.errors import InfeasibleBudgetError
from overspill.models.drawing import randomness, set_randomness
from overspill.pytorch.dispatch import OpOverload, TorchDispatchMode, pop_mode, push_mode, schema_of
from overspill.pytorch.schemas import written_arguments
from overspill.pytorch.storages import has_storage, storage_key
from overspill.pytorch.trees import tree_leaves
from overspill.runtime.tracker import LiveBytes

from .renewal import Renewal

T = TypeVar("T")
FORWARD = ""
"""In place of the name of an op whose backward takes something."""

SPARE = 1.25
"""Where sizes vary, plans set aside memory for so many times what was seen."""


class TooManyRows(BaseException):
    """Ends a call that chooses more rows than its plans have memory for; no `except Exception` of a model gets it."""


class Rows(NamedTuple):
    """Rows that values choose in a call."""

    total: int = 0
    """By all its ops."""
    most: int = 0
    """By one of them."""

    def joined(self, other: Rows, times: float = 1.0) -> Rows:
        """Return the larger of both in either, with what is larger in `other` so many `times`."""
        return Rows(*(mine if mine >= of else ceil(times * of) for mine, of in zip(self, other, strict=True)))


class Growth:
    """How bytes grow with rows, by what was seen of the fewest and of the most."""

    def __init__(self) -> None:
        self._least = self._most = (0, 0)

    @property
    def is_known(self) -> bool:
        """Whether it was seen of different numbers of rows."""
        return self._most[0] > self._least[0] > 0

    def see(self, rows: int, nbytes: int) -> None:
        """Note what so many rows have."""
        if not self._least[0] or (rows, -nbytes) < (self._least[0], -self._least[1]):
            self._least = rows, nbytes
        if rows >= self._most[0] or nbytes > self._most[1]:
            self._most = max(rows, self._most[0]), max(nbytes, self._most[1])

    def at(self, rows: int) -> int:
        """Return the bytes to expect of so many rows: in proportion until it is known how they grow."""
        (few, least), (many, most) = self._least, self._most
        if rows <= many:
            return most
        each = most / many if many else 0  # none of the rows that were chosen
        if self.is_known:
            each = min(each, (most - least) / (many - few))
        return ceil(most + each * (rows - many))


class RoutedRows(TorchDispatchMode):
    """Watches the code between the planned graphs of one model's calls.

    `bound` is None before a call has chosen rows; `fallback` is a smaller one that is enough for what was seen.
    """

    def __init__(self, has_room: Callable[[RoutedRows, Rows], bool], renewal: Renewal) -> None:
        """Watch; `has_room` says whether the plans in force have memory for a bound."""
        super().__init__()
        self.bound: Rows | None = None
        self.fallback: Rows | None = None
        self._has_room = has_room
        self._renewal = renewal
        self._is_pushed = False
        self._made: set[int] = set()
        self._before: list[tuple[Tensor, Tensor]] = []
        self._drawn: Any = None
        self._live: LiveBytes | None = None
        self.kept = Growth()
        """What the code keeps for backward, by the rows of a call."""
        self.taken: defaultdict[str, Growth] = defaultdict(Growth)
        """What it takes at once besides, by the rows of one op: in forward, and in the backwards of ops by name."""
        self.counts: list[int] = []
        """The rows that each op of the call has chosen."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return that torch.compile traces as it does without."""
        return True

    # -- a call

    def run(self, call: Callable[[], T], plan_again: Callable[[], None]) -> T:
        """Return what `call` returns; where it chooses too many rows, it is undone and runs again by larger plans.

        Raises InfeasibleBudgetError if there are none within the budget. Then nothing of the call has been done.
        """
        before, over, again = (self.bound, self.fallback), "", False
        self.begin()
        try:
            while True:
                try:
                    if again:
                        plan_again()
                    result = call()
                except TooManyRows:
                    if not over:
                        over = self._says()
                        self._renewal.over(over)
                    self.offer()
                except InfeasibleBudgetError as error:
                    if self.fallback is not None:
                        self.bound, self.fallback = self.fallback, None
                    elif over:
                        self.undo()
                        self.bound, self.fallback = before
                        self._renewal.is_asked = True
                        raise error.with_help(
                            f"; this batch {over}: nothing of its step has been done; smaller batches, or grouped "
                            f"products for experts ({GROUPED}), would do too"
                        ) from None
                    else:
                        raise
                else:
                    self.fallback = None
                    return result
                again = True
                gc.collect()  # the call's tensors, which errors of torch.compile hold in cycles
                self.undo()
        finally:
            self.end()

    def _says(self) -> str:
        known, seen = self.bound or Rows(), self.seen
        rows = f"{seen.most} rows in one op" if seen.most > known.most else f"{seen.total} rows"
        of = known.most if seen.most > known.most else known.total
        return f"chooses by values {rows}, where its plans know {of}"

    def begin(self) -> None:
        """Begin a call, which may be undone once there is a bound."""
        self.end()
        self.counts.clear()
        if self.bound is not None:
            self._drawn = randomness()

    def undo(self) -> None:
        """Let all tensors that the call has changed, and the random generators, be as they were; begin it again."""
        self.pause(())
        for tensor, before in reversed(self._before):
            tensor.data.copy_(before)
        set_randomness(self._drawn)
        self.begin()

    def end(self) -> None:
        """End watching, and let go of what an undone call would need."""
        self.pause(())
        self._made.clear()
        self._before.clear()

    def pause(self, changed: Iterable[Tensor]) -> None:
        """Watch no more, before a planned graph that changes some tensors in place."""
        if self._is_pushed:
            self._is_pushed = False
            pop_mode()
        self._see_taken()
        self._live = None
        if self.bound is not None:
            self._keep(changed)

    def resume(self, given: Iterable[Any], made: Iterable[Any]) -> None:
        """Watch what runs behind a graph that has `made` these, from what it was `given`."""
        if self.bound is not None:
            self._made |= {*_keys(made)}.difference(_keys(given))
        if torch.is_grad_enabled():
            self._is_pushed = True
            push_mode(self)

    # -- bounds

    def offer(self) -> None:
        """Let the bound be a quarter more than the rows that were seen, and the fallback just enough for them."""
        bound, fallback = self.bound or Rows(), self.fallback or self.bound or Rows()
        self.bound, self.fallback = bound.joined(self.seen, SPARE), fallback.joined(self.seen)

    @property
    def seen(self) -> Rows:
        """The rows that the call has chosen so far."""
        return Rows(sum(self.counts), max(self.counts, default=0))

    def needs(self, rows: Rows) -> tuple[int, int]:
        """Return the bytes to expect of so many rows: those kept for backward, and those taken at once besides."""
        return self.kept.at(rows.total), max((of.at(rows.most) for of in self.taken.values()), default=0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op. Raises TooManyRows behind one that chooses too many rows, before anything is done with them."""
        kwargs = kwargs or {}
        if self.bound is not None and isinstance(func, OpOverload) and schema_of(func).is_mutable:
            self._keep(t for t in tree_leaves(written_arguments(func, args, kwargs)) if isinstance(t, Tensor))
        if self._live is None:
            result = func(*args, **kwargs)
        else:
            result = self._live.__torch_dispatch__(func, types, args, kwargs)
        if self.bound is not None:
            self._made |= {*_keys([result])}.difference(_keys([args, kwargs]))
        if _chooses_rows(func, args):
            self._choose(next(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result

    def _choose(self, rows: Tensor) -> None:
        count = len(rows) if rows.dim() else 1
        self._see_taken()
        self.counts.append(count)
        if self._live is None and not self.taken[FORWARD].is_known:
            self._live = LiveBytes(rows.device)
        if self.bound is None or self.bound.joined(self.seen) == self.bound:
            return
        for bound in (self.bound.joined(self.seen, SPARE), self.bound.joined(self.seen)):
            if self._has_room(self, bound):
                self.bound = bound
                return
        raise TooManyRows

    def _see_taken(self) -> None:
        """Note what the rows that were chosen last have taken so far; what is live still is kept, or goes on."""
        if self._live is not None:
            self.taken[FORWARD].see(self.counts[-1], self._live.peak_bytes - self._live.live_bytes)
            self._live.peak_bytes = self._live.live_bytes

    def _keep(self, changed: Iterable[Tensor]) -> None:
        """Keep what tensors from before the call hold that are about to be changed."""
        for tensor in changed:
            if has_storage(tensor) and (key := storage_key(tensor)) not in self._made:
                if tensor.nbytes == tensor.untyped_storage().nbytes():
                    self._made.add(key)  # all of it is kept
                self._before.append((tensor, tensor.detach().clone()))


@cache
def _may_choose_rows(op: Any) -> bool:
    return torch.Tag.dynamic_output_shape in getattr(op, "tags", ())


def _chooses_rows(op: Any, args: tuple[Any, ...]) -> bool:
    """Return whether values decide how many rows a call of `op` makes."""
    if op is torch.ops.aten.index.Tensor:
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return _may_choose_rows(op)


def _keys(values: Iterable[Any]) -> Iterator[int]:
    """Yield the keys of the storages of tensors."""
    return (storage_key(t) for t in tree_leaves(values) if isinstance(t, Tensor) and has_storage(t))
