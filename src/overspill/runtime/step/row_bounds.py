"""Bounds on the rows that values choose in a train step, from its first steps and from those that were over."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import ceil
from typing import Any

from overspill.capture.compiled.chosen_rows import ChosenRows, OtherRows
from overspill.core.errors import UnsupportedError
from overspill.runtime.compiled.routed_rows import SPARE

SHARES = (1.0, 0.5, 0.25, 0.125)
"""Shares of all rows that the first plan allows each op, the first that fits the budget."""


MOST_STOPS = 64
"""How often a step may begin again."""
MOST_PINNED = 8
"""How many steps may decide by their very number of rows, each with a capture of its own."""


class RowBounds:
    """The bounds by kind of inputs."""

    def __init__(self) -> None:
        self.steps_over = 0
        """How many steps chose more rows than their plans knew, and began again."""
        self._known: dict[Any, list[int]] = {}
        self._before: tuple[Any, list[int] | None] | None = None
        self._settled: set[Any] = set()
        self._seen: tuple[int, ...] = ()
        self._pinned = 0  # of how many of these ops the trace is to decide by just these rows
        self._is_over = False
        self._stops = self._pins = 0

    def begin(self) -> None:
        """Begin a step, of which nothing is known."""
        self._seen, self._pinned, self._is_over, self._before, self._stops = (), 0, False, None, 0

    def fits(self, rows: ChosenRows | None) -> bool:
        """Return whether a captured step may be that of the call, by what is known of its rows."""
        return rows is None or rows.accepts(self._seen)

    def tries(self, key: Any) -> Iterator[ChosenRows]:
        """Yield the rows to capture a step for, those that are wanted most first."""
        known, seen = self._known.get(key), self._seen
        if known is None:
            yield from (ChosenRows(key, (), share) for share in SHARES)
            return

        def wanted(most: list[int]) -> list[int]:
            own = [*most, *seen[len(most) :]]
            return [seen[i] if i < self._pinned or (i < len(seen) and seen[i] < 2) else own[i] for i in range(len(own))]

        yield ChosenRows(key, wanted(known), pinned=self._pinned)
        if self._before is not None and self._is_over:
            least = self._before[1] or known
            just = [max(own) for own in zip(least, (*seen, *least[len(seen) :]), strict=False)]
            yield ChosenRows(key, wanted(just), pinned=self._pinned)

    def stopped(self, error: OtherRows, rows: ChosenRows) -> None:
        """Learn from a run that has ended; warn if it is over. Raises UnsupportedError if rows decide too much."""
        self._stops += 1
        if self._stops > MOST_STOPS or self._pins > MOST_PINNED:
            raise UnsupportedError(
                f"{error}, and the step takes another way for each; let shapes and branches follow from fewer numbers "
                "of rows, or use overspill.compile, which runs such a loop between its plans"
            )
        known = self._known.get(rows.key)
        if self._before is None:
            self._before = rows.key, known
        own = [max(2, bound) for bound in rows.bounds] if known is None else [*known]
        own += [2] * (len(error.counts) - len(own))
        over = [i for i, count in enumerate(error.counts) if count > own[i]]
        if not over and error.counts[-1] > 1:
            self._pinned, self._pins = len(error.counts), self._pins + 1
        for i in over:
            own[i] = ceil(SPARE * error.counts[i])
        self._known[rows.key], self._seen = own, error.counts
        if over and not self._is_over:
            self._is_over = True
            self.steps_over += 1
            warnings.warn(f"{error}: it begins again, by a plan for more", stacklevel=3)

    def give_up(self) -> None:
        """Forget what a step has taught that has no plan."""
        if self._before is not None and (known := self._before[1]) is not None:
            self._known[self._before[0]] = known

    @property
    def is_over(self) -> bool:
        """Whether the step that runs is over the bound that was known before it."""
        return self._is_over

    def ran(self, rows: ChosenRows, *, moves: bool) -> bool:
        """Learn from a step that has run; return whether it is to be planned again, by closer bounds.

        The plan of the first step, which knew none, is kept if nothing of it `moves`.
        """
        if rows.key in self._settled:
            return False
        self._settled.add(rows.key)
        if moves:
            self._known[rows.key] = [max(2, ceil(SPARE * count)) for count in rows.counts]
        return moves
