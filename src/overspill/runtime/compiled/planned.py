"""What a session keeps of each plan that it has made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from overspill.capture.compiled.graph import REST
from overspill.core import Verb
from overspill.plans.plan import Plan

from .beside import Room
from .pending import Kind, Part


class Step(Protocol):
    """What a session asks of a train step."""

    def join(self, beside: Callable[[], int]) -> None:
        """Leave room for what `beside` gives."""

    def kept_bytes(self) -> int:
        """Bytes between two steps."""


@dataclass(frozen=True)
class Frame:
    """Which graph of the model is planned: Dynamo's frame, and whether a graph break follows it."""

    id: int
    broken: bool


@dataclass
class Planned:
    """One plan, of one graph of a part of the models: each input shape, and evaluation, has its own.

    Between its forward and its backward it leaves `retained_bytes` on the device; it has `room` for what others leave.
    """

    frame: Frame
    kind: Kind
    plan: Plan
    retained_bytes: int
    room: Room
    parameters: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    """At which positions the caller passes inputs."""
    beside: Counter[Kind] = field(default_factory=Counter)
    """Calls that are known to be pending when it runs."""
    reserved_bytes: int = 0
    """What has to be set aside for what runs between its forward and its backward."""
    partition: float | None = None
    """The `activation_memory_budget` of the partition that it is of, with Inductor's kernels."""

    @property
    def part(self) -> Part:
        """The part of the job that it is for."""
        return self.kind.part

    @property
    def least_peak_bytes(self) -> int:
        """The peak, if no more is set aside than has to be: what it has left it sets aside for graphs that follow."""
        ops = self.plan.graph.ops
        spare = {op.id: max(0, op.workspace_bytes - self.reserved_bytes) for op in ops if op.name == REST}
        each = (
            live - (spare.get(i.target, 0) if self.frame.broken and i.verb is Verb.RUN else 0)
            for i, live in zip(self.plan.schedule.instructions, self.plan.timeline.live_bytes, strict=True)
        )
        return max(each, default=self.plan.peak_bytes)
