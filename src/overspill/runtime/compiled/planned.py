"""A session's record of each of its plans."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from overspill.capture.compiled.graph import REST
from overspill.core import Phase, Verb
from overspill.plans.plan import Plan

from .concurrent_plans import Room
from .pending_calls import GraphFrame, GraphKey, Part


class SessionStep(Protocol):
    """The train step's side of a shared session."""

    def join(self, beside: Callable[[], int]) -> None:
        """Reserve the bytes that `beside` returns."""

    def kept_bytes(self) -> int:
        """Return the bytes that the step keeps between two calls."""


@dataclass
class Planned:
    """A plan of one graph; each input shape, and evaluation, has its own."""

    frame: GraphFrame
    kind: GraphKey
    plan: Plan
    retained_bytes: int
    """Bytes that it keeps on the device between forward and backward."""
    room: Room
    """Bytes that it leaves to other calls."""
    parameters: tuple[int, ...] = ()
    """Ids of the parameters that the graph reads."""
    given: tuple[int, ...] = ()
    """Positions of the caller's inputs among the arguments."""
    beside: Counter[GraphKey] = field(default_factory=Counter)
    """Calls known to be pending when it runs."""
    reserved_bytes: int = 0
    """Bytes reserved for computation between forward and backward."""
    partition: float | None = None
    """The `activation_memory_budget` of its partition, with Inductor's kernels."""
    made_into_loss: frozenset[int] = frozenset()
    """Outputs that the graph makes into a loss which it returns."""
    ends_in_loss: bool = False
    """Whether the plan reserves no memory for another loss made from them."""

    @property
    def part(self) -> Part:
        """The part of the job that the graph belongs to."""
        return self.kind.part

    @property
    def least_peak_bytes(self) -> int:
        """Peak bytes without the spare bytes reserved for later graphs."""
        ops = self.plan.graph.ops
        spare = {op.id: max(0, op.workspace_bytes - self.reserved_bytes) for op in ops if op.name == REST}
        each = (
            live - (spare.get(i.target, 0) if self.frame.broken and i.verb is Verb.RUN else 0)
            for i, live in zip(self.plan.schedule.instructions, self.plan.timeline.live_bytes, strict=True)
        )
        return max(each, default=self.plan.peak_bytes)

    @property
    def between_bytes(self) -> int:
        """Bytes that it has on the device between forward and backward, without those reserved there."""
        live = self.plan.timeline.live_bytes
        for number, instruction in enumerate(self.plan.schedule.instructions):
            op = self.plan.graph.ops[instruction.target] if instruction.verb is Verb.RUN else None
            if op is not None and op.phase is not Phase.FORWARD:
                return live[number] - op.workspace_bytes if op.name == REST else min(live[number - 1 : number + 1])
        return self.plan.peak_bytes
