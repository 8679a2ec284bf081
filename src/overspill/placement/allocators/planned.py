"""Planned addresses for jobs that repeat their steps; its rules are in native/allocators/planned.hpp."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from .native_allocator import NativeAllocator


@dataclass(frozen=True)
class PlannedConfig:
    """Settings of the planned allocator."""

    background: bool = False
    """Whether plans are solved on a thread of their own, while the job goes on."""
    thorough: bool = True
    """Whether hard steps are solved for seconds, as under a running job, or for tenths of one."""


class PlannedCounts(NamedTuple):
    """How many requests got what, and how many steps and plans there were."""

    planned: int
    """At their planned address."""
    carried: int
    """Alive beyond their step, and never planned."""
    displaced: int
    """Their place was taken, or too small."""
    foreign: int
    """No plan knew them."""
    steps: int
    plans: int
    since: int
    """The event before which the last plan came into force; -1: there is none."""


class PlannedAllocator(NativeAllocator):
    """Each request of a repeated step has a planned address; others get PyTorch's expandable segments."""

    name = core = "planned"
    learns_steps: ClassVar = 3
    coalesces: ClassVar = False  # the tail of a region joins nothing
    summary: ClassVar = "repeated steps at planned addresses, everything else in expandable segments"
    source: ClassVar = "Sekiyama et al., Profile-guided memory optimization (2018), section 4"
    config_type: ClassVar = PlannedConfig
    config: PlannedConfig

    @property
    def counts(self) -> PlannedCounts:
        """What happened so far."""
        return PlannedCounts(*self._core.counts())


LIVE = PlannedAllocator.name
"""The allocator that a job can have in place of PyTorch's (`overspill.allocator`)."""
CALLED = f'overspill.allocator("{LIVE}")'
