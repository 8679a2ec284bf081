"""Step programs: a step's ops with recomputations inserted, and the tensor lifetimes that follow.

Positions count steps. A tensor is *touched* at the steps that read or write it. Between two touches is a *gap*, in
which its device copy is not needed:

    step        0     1     2     3     4     5     6
    x         write  read               read  read
    touches     *-----*                   *-----*
    gap               (1 ............... 4)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from overspill.core import Graph, Op, Phase

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class ProgramStep:
    """One op at one position: its run, or a recomputation making `makes`."""

    op: int
    recompute: bool = False
    makes: tuple[int, ...] = ()


class Gap(NamedTuple):
    """A span in which `tensor` is not used: between the touches `start` and `end`.

    A gap that `wraps` runs from a persistent tensor's last touch, over the end of the step, to its first in the next.
    """

    tensor: int
    start: int
    end: int
    rematerialized: bool = False
    """A recomputation makes it at `end`, so it is dropped at `start` and nothing need be stored."""

    @property
    def wraps(self) -> bool:
        """Whether the gap spans the end of the step."""
        return self.end <= self.start

    def covers(self, position: int) -> bool:
        """Return whether `position` is strictly inside."""
        if self.wraps:
            return position > self.start or position < self.end
        return self.start < position < self.end


class StepProgram:
    """The steps of `graph` with tensors `recompute` dropped after forward and recomputed in backward.

    A tensor that such a recomputation reads and that is gone by then is recomputed as well. It is kept if that is not
    possible, or if it is among `kept`. Recomputed tensors stay until their last use, those in `drop_after_use` only
    until the op that needed them has run. `algorithms` has the number of the algorithm for ops that do not take their
    fastest.
    """

    def __init__(
        self,
        graph: Graph,
        recompute: Collection[int] = (),
        algorithms: Mapping[int, int] | None = None,
        drop_after_use: Collection[int] = (),
        kept: Collection[int] = (),
    ) -> None:
        self.graph = graph
        self.algorithms = dict(algorithms or {})
        made = _Recomputations(graph, frozenset(recompute), frozenset(drop_after_use), frozenset(kept))
        self.steps = tuple(made.steps())
        self.length = len(self.steps)
        # Where each tensor is touched, made and written; outputs are touched at the end.
        touches: list[list[int]] = [[] for _ in graph.tensors]
        births: list[list[int]] = [[] for _ in graph.tensors]
        written: list[list[int]] = [[] for _ in graph.tensors]
        for position, step in enumerate(self.steps):
            reads, writes = self.reads_writes(step)
            for tensor in dict.fromkeys(reads + writes):
                touches[tensor].append(position)
            for tensor in writes:
                if not step.recompute:
                    written[tensor].append(position)
                if step.recompute or not births[tensor]:
                    births[tensor].append(position)
        for tensor in graph.outputs:
            touches[tensor].append(self.length)
        self.touches = tuple(map(tuple, touches))
        self.births = tuple(map(tuple, births))
        self.written = tuple(map(tuple, written))

    def with_algorithms(self, algorithms: Mapping[int, int]) -> StepProgram:
        """Return the same steps, and so lifetimes, with other algorithms."""
        other = copy(self)
        other.algorithms = dict(algorithms)
        return other

    def op(self, step: ProgramStep) -> Op:
        """Return the op of `step`."""
        return self.graph.ops[step.op]

    def reads_writes(self, step: ProgramStep) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tensors that `step` reads, and those that it makes or updates."""
        op = self.op(step)
        return (op.recompute_reads, step.makes) if step.recompute else (op.reads, op.writes)

    def algorithm(self, step: ProgramStep) -> int:
        """Return the number of the algorithm of `step`."""
        return self.algorithms.get(step.op, 0)

    def durations(self, seconds: Sequence[float]) -> NDArray[np.float64]:
        """Return the seconds that each step takes, `[steps]`; op `i` takes `seconds[i]` with its fastest algorithm."""
        return np.array([seconds[s.op] * self.op(s).slowdown_of(self.algorithm(s)) for s in self.steps])

    def clock(self, seconds: Sequence[float]) -> NDArray[np.float64]:
        """Return the start times of steps and the program's end, in seconds without waits, `[steps + 1]`."""
        return np.concatenate([[0.0], np.cumsum(self.durations(seconds))])

    def _unwanted_bytes(self, step: ProgramStep) -> int:
        if not step.recompute:
            return 0
        unwanted = set(self.op(step).recompute_writes) - set(step.makes)
        return sum(self.graph.tensors[t].nbytes for t in unwanted)

    @cached_property
    def end_of_forward(self) -> int:
        """The first position after forward."""
        return 1 + max(
            (i for i, s in enumerate(self.steps) if self.op(s).phase is Phase.FORWARD and not s.recompute), default=-1
        )

    @cached_property
    def end_of_backward(self) -> int:
        """The first position after backward."""
        return 1 + max(
            (i for i, s in enumerate(self.steps) if s.recompute or self.op(s).phase is not Phase.UPDATE), default=-1
        )

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """All gaps of tensors that are not persistent, or movable, by tensor and start."""
        found = []
        for tensor in self.graph.tensors:
            touches = self.touches[tensor.id]
            if tensor.persistent and not tensor.movable:
                continue
            rematerialized = set() if tensor.persistent else set(self.births[tensor.id][1:])
            found += [Gap(tensor.id, start, end, end in rematerialized) for start, end in pairwise(touches)]
            if tensor.persistent and touches:
                found.append(Gap(tensor.id, touches[-1], touches[0]))
        return tuple(found)

    def live_bytes(self, absent: Collection[Gap] = ()) -> Positions:
        """Return the bytes on the device during each step, `[steps]`, with tensors away in the gaps `absent`.

        Rematerialized tensors are away in their gaps anyway.
        """
        # Bytes of tensors, then transient bytes, then smaller workspaces of other algorithms.
        change = self._changes.copy()
        tensors = self.graph.tensors
        for gap in absent:
            if gap.rematerialized:
                continue
            nbytes = tensors[gap.tensor].nbytes
            change[gap.start + 1] -= nbytes
            change[gap.end] += nbytes
            if gap.wraps:
                change[0] -= nbytes
        live: Positions = np.cumsum(change[: self.length]) + self._transient
        for op, algorithm in self.algorithms.items():
            if saved := self.graph.ops[op].workspace_bytes - self.graph.ops[op].workspace_of(algorithm):
                for position in self._positions[op]:
                    live[position] -= saved
        return live

    @cached_property
    def _changes(self) -> Positions:
        """Change in bytes at each step, with only rematerialized tensors away."""
        change = np.zeros(self.length + 2, dtype=np.int64)
        for tensor in self.graph.tensors:
            if touches := self.touches[tensor.id]:
                first = 0 if tensor.persistent else touches[0]
                last = self.length if tensor.persistent else touches[-1]
                change[first] += tensor.nbytes
                change[last + 1] -= tensor.nbytes
            elif tensor.persistent:
                change[0] += tensor.nbytes
        for gap in self.gaps:
            if gap.rematerialized:
                change[gap.start + 1] -= self.graph.tensors[gap.tensor].nbytes
                change[gap.end] += self.graph.tensors[gap.tensor].nbytes
        return change

    @cached_property
    def _transient(self) -> Positions:
        """Bytes that only the step itself needs, with its op's fastest algorithm."""
        return np.array([self._unwanted_bytes(s) + self.op(s).workspace_bytes for s in self.steps], dtype=np.int64)

    @cached_property
    def _positions(self) -> dict[int, list[int]]:
        """The positions of each op."""
        found: dict[int, list[int]] = defaultdict(list)
        for position, step in enumerate(self.steps):
            found[step.op].append(position)
        return found


class _Recomputations:
    """Inserts recomputations before the backward ops that need them, each as late as possible."""

    def __init__(
        self, graph: Graph, dropped: frozenset[int], drop_after_use: frozenset[int], kept: frozenset[int]
    ) -> None:
        self.graph = graph
        self.dropped = dropped
        self.drop_after_use = drop_after_use & dropped
        self.kept = kept
        self.rematerialized: set[int] = set()
        self.last_use = [uses[-1] if uses else -1 for uses in graph.uses]
        for tensor in graph.outputs:
            self.last_use[tensor] = len(graph.ops)

    def steps(self) -> list[ProgramStep]:
        steps: list[ProgramStep] = []
        for op in self.graph.ops:
            if op.phase is not Phase.FORWARD:
                self.rematerialized -= self.drop_after_use
                for tensor in op.reads:
                    self._ensure(tensor, op.id, steps)
            steps.append(ProgramStep(op.id))
        return steps

    def _gone(self, tensor: int, now: int) -> bool:
        """Return whether `tensor` is gone when op `now` is about to run."""
        if self.graph.tensors[tensor].persistent or tensor in self.rematerialized or tensor in self.kept:
            return False
        made_in_forward = self.graph.ops[self.graph.producer[tensor]].phase is Phase.FORWARD
        return made_in_forward and (tensor in self.dropped or self.last_use[tensor] < now)

    def _ensure(self, tensor: int, now: int, steps: list[ProgramStep]) -> None:
        """Append recomputations that bring `tensor` back; iterative, because chains can be as long as the network."""
        pending = [tensor]
        while pending:
            wanted = pending[-1]
            op = self.graph.ops[self.graph.producer[wanted]] if self._gone(wanted, now) else None
            if op is None or not self.graph.may_recompute(wanted):
                pending.pop()
                continue
            # First what it reads, then the op itself.
            missing = [t for t in op.recompute_reads if self._gone(t, now) and self.graph.may_recompute(t)]
            if missing:
                pending.extend(missing)
                continue
            makes = tuple(t for t in op.recompute_writes if t == wanted or (t in self.dropped and self._gone(t, now)))
            self.rematerialized.update(makes)
            steps.append(ProgramStep(op.id, recompute=True, makes=makes))
            pending.pop()
