"""The two-ended pool in a training loop: sized by what steps take.

A large main space first, squeezed after a step, enlarged when one fails. Dymem, section 3.3.3: the size is init -
squeeze_gap + beta; "if the training fails, an additional beta is provisioned".
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from overspill.core import Mobility
from overspill.placement.allocators.two_ended import BETA_BYTES, FIRST_POOL_SHARE
from overspill.placement.simulated_device import round_up
from overspill.plans.plan import Plan

from .allocator import ALIGNMENT_BYTES, LiveAllocator, Statistics
from .groups import UNPLANNED
from .need import TWO_ENDED, need_of, outside_bytes
from .steps import LiveSteps, PoolReport

BETA_CARD_BYTES = 12 << 30
"""The paper's card, for which its β is; a smaller budget takes the same share."""


class TwoEndedSteps(LiveSteps):
    """Resizes the main space between steps, when it is empty.

    With `restarts` an allocation without room there fails, and the step is started again (`enlarge`); without, it gets
    memory outside the main space, which is larger from the next step on.
    """

    name: ClassVar = TWO_ENDED

    def __init__(self, allocator: LiveAllocator, *, restarts: bool = False, beta_bytes: int | None = None) -> None:
        self.restarts = restarts
        super().__init__(allocator)
        self._beta_bytes = beta_bytes
        self._main_bytes = 0
        self._beside_bytes = 0
        self._overflows = 0
        self._seen_step = False
        self._squeezed = False
        self._beside = False  # whether overflow of this step lies outside the main space
        self._spills = False
        self._squeezes = self._restarted = self._resumed = 0
        allocator.group_untold(UNPLANNED if allocator.device == "cuda" else Mobility.MOVABLE)

    @property
    def beta_bytes(self) -> int:
        """β: bytes left free for steps that take more than the first."""
        if self._beta_bytes is not None:
            return self._beta_bytes
        share = (self._limit or BETA_CARD_BYTES) * BETA_BYTES // BETA_CARD_BYTES
        return max(ALIGNMENT_BYTES, min(BETA_BYTES, round_up(share, ALIGNMENT_BYTES)))

    def limit_for(self, plan: Plan, budget_bytes: int) -> None:
        """As for any pool; the first plan also sizes the main space."""
        super().limit_for(plan, budget_bytes)
        need = need_of(plan, TWO_ENDED, budget_bytes)
        self._beside_bytes = max(self._beside_bytes, need.beside_bytes + self._unplanned_bytes(plan))
        if not self._seen_step and self._limit is not None:
            few, many = FIRST_POOL_SHARE
            self._resize(max(self._main_bytes, self._limit * few // many, need.main_bytes))

    def begin_step(self) -> None:
        """Begin a step, with the main space resized by what earlier steps took."""
        now = self.allocator.statistics()
        if now.main_bytes:
            self._seen_step = True
            if now.overflows > self._overflows:
                self._provision(now.overflows)
            elif not self._squeezed:
                self._squeeze(now)
        self._beside = False
        super().begin_step()

    def enlarge(self) -> bool:
        """Add β for a step that starts again; whether there is more room.

        Where there can be no more, scratch gets room elsewhere.
        """
        before = self._main_bytes
        if not self.restarts:
            return False
        if not self._resize(before + self.beta_bytes) or self._main_bytes == before:
            return self._spill()
        self._squeezed = True  # what failed is not squeezed
        self._restarted += 1
        return True

    def go_on_beside(self) -> bool:
        """Let overflow lie outside the main space for this step; whether that is new."""
        if not self.restarts:
            return False
        if self._beside:
            return self._spill()
        self._beside = True
        self.allocator.resize(self._main_bytes, grows=True)
        self._resumed += 1
        return True

    def report(self) -> PoolReport:
        """The pool's statistics so far."""
        now = self.allocator.statistics()
        return replace(
            super().report(), main_bytes=self._main_bytes, overflows=now.overflows, squeezes=self._squeezes,
            restarts=self._restarted, resumptions=self._resumed,
        )  # fmt: skip

    def _unplanned_bytes(self, plan: Plan) -> int:
        """Bytes outside the main space of what no planned graph allocates; CUDA only."""
        if self.allocator.device != "cuda":
            return 0
        now = self.allocator.statistics()
        return max(outside_bytes(plan.graph), now.reserved_bytes - now.main_bytes)

    def _spill(self) -> bool:
        """Take what the budget has no room for from PyTorch's allocator. Returns whether that is new."""
        is_new, self._spills = not self._spills, self.allocator.device == "host"
        self.allocator.let_spill(self._spills)
        return is_new and self._spills

    def _provision(self, overflows: int) -> None:
        """Add β after a step that overflowed."""
        if self._resize(self._main_bytes + self.beta_bytes):
            self._overflows, self._squeezed = overflows, True

    def _squeeze(self, now: Statistics) -> None:
        """Shrink the main space by the gap that was never used, but for β."""
        smaller = now.main_bytes - now.least_gap_bytes + self.beta_bytes
        if smaller >= now.main_bytes:
            self._squeezed = True
        elif self._resize(smaller):
            self._squeezes += 1
            self._squeezed = True

    def _resize(self, main_bytes: int) -> bool:
        self._main_bytes, before = self._within(main_bytes), self._main_bytes
        done = self.allocator.resize(self._main_bytes, grows=not self.restarts)
        if not done:
            self._main_bytes = before
        return done

    def _within(self, main_bytes: int) -> int:
        """`main_bytes`, limited so that the rest of the pool has room."""
        wanted = round_up(main_bytes, ALIGNMENT_BYTES)
        if self._limit is None:
            return wanted
        most = max(self._limit - self._beside_bytes, ALIGNMENT_BYTES)
        return min(wanted, most // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
