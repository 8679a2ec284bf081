"""Drives a live pool through the steps of a training loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

from overspill.plans.plan import Plan

from .allocator import LiveAllocator, check_benchmark
from .groups import cpu_bytes, planned_blocks
from .need import VIRTUAL, outside_bytes


@dataclass(frozen=True)
class PoolReport:
    """What a live pool did in a run.

    `capacity_bytes` is its limit, `peak_bytes` the most it held. On the CPU, `served_share` is the share of the last
    step's requested bytes that came from the pool, and `spilled_peak_bytes` the most at once that found no room there
    and came from PyTorch's allocator: scratch of kernels, which a budget on the CPU does not count. Of the two-ended
    pool: `main_bytes` in the end, and how often it was squeezed, steps were started again or went on with more memory,
    and blocks overflowed.
    """

    name: str
    capacity_bytes: int | None
    peak_bytes: int
    served_share: float | None = None
    spilled_peak_bytes: int = 0
    main_bytes: int | None = None
    squeezes: int = 0
    restarts: int = 0
    resumptions: int = 0
    overflows: int = 0


class LiveSteps:
    """Drives an allocator through a training loop; this one only lets its pool serve."""

    name: ClassVar = VIRTUAL
    restarts: bool = False
    """Whether an allocation without room fails, so that the step starts again."""

    def __init__(self, allocator: LiveAllocator) -> None:
        self.allocator = allocator
        self.holds_model = False
        """Whether a whole step's weights and state lie in the pool."""
        allocator.let_spill(not self.restarts)
        self._limit: int | None = None
        self._begun: tuple[int, int] | None = None

    def limit(self, capacity_bytes: int) -> None:
        """Limit the pool to `capacity_bytes`, or an earlier plan's limit if larger."""
        self._limit = max(self._limit or 0, capacity_bytes)
        self.allocator.limit(self._limit)

    def limit_for(self, plan: Plan, budget_bytes: int) -> None:
        """Limit the pool to what `plan` has for it.

        Of a card, what its context leaves; of a CPU budget, what lies outside the pool is taken off.
        """
        if self.allocator.device != "cuda":
            self.limit(max(budget_bytes - outside_bytes(plan.graph), 1))
        elif plan.device_budget_bytes is not None:
            self.limit(plan.device_budget_bytes - plan.device.context_bytes)
        elif plan.reserved_bytes is not None:
            self.limit(plan.reserved_bytes)

    def begin_step(self) -> None:
        """Begin a step.

        Raises RequestError where PyTorch has since been set to do what does not work with the allocator.
        """
        if self.allocator.device == "cuda":
            check_benchmark()
        if self.allocator.device == "host":
            self._begun = cpu_bytes()
        self.allocator.begin_step()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context around a planned program in this thread."""
        ours = self.allocator.serving() if self.allocator.device == "host" else nullcontext()
        with ours, planned_blocks():
            yield

    def enlarge(self) -> bool:
        """Make more room for a step that starts again; whether there is."""
        return False

    def go_on_beside(self) -> bool:
        """Make more room for the rest of a step; whether there is.

        For a step that cannot be started again.
        """
        return False

    def report(self) -> PoolReport:
        """The pool's statistics so far."""
        now = self.allocator.statistics()
        report = PoolReport(
            self.name, self.allocator.capacity_bytes, now.peak_reserved_bytes, spilled_peak_bytes=now.peak_spilled_bytes
        )
        if self._begun is None:
            return report
        ours, elsewhere = (end - begin for begin, end in zip(self._begun, cpu_bytes(), strict=True))
        return replace(report, served_share=ours / (ours + elsewhere) if ours + elsewhere else None)
