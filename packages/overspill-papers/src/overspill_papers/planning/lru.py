"""Evict the least recently used tensors when memory is short, and no more than the budget requires."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from overspill.planning.assemble import Transfer
from overspill.planning.floor import Floor, floor_of
from overspill.planning.gaps import latest_release
from overspill.planning.step_program import Gap, Positions, StepProgram

ROUNDS = 4
"""Steps in a row in which persistent tensors that stay over the end of a step are looked for; two are mostly enough."""


def evictions(
    program: StepProgram,
    fetched: Mapping[Gap, int],
    live: Positions,
    budget_bytes: int,
    *,
    always: bool = False,
    emptied: bool = False,
) -> dict[Gap, int] | None:
    """Return the steps before which tensors in the gaps `fetched` free their memory, or None if that is not enough.

    This is SuperNeurons' LRU Tensor Cache (PPoPP'18 §3.3.2, Alg. 2), and the retirement of the oldest swap-out of the
    adaptive window (§3, Fig. 2b). The tensor with the oldest last use leaves before the first step that needs its
    memory. `fetched` has the step before which each returns. A tensor still there then stays; with `always` it leaves
    and returns. With `emptied`, every tensor that could be away at the end of the step is. A tensor that leaves in
    forward and must leave in backward leaves between them, since these are two graphs. `live` are the bytes of each
    step with nothing away.

    Where `fetched` does not depend on the budget, each tensor leaves later or not at all with a larger one. The tensors
    still there are then a superset, whose surplus is older than all others. So a larger budget is never slower.
    """
    cache = _Cache(program, fetched, live, budget_bytes, always)
    staying = () if emptied else cache.wrapping
    for _ in range(1 if emptied else ROUNDS):
        left = cache.run(staying)
        if left is None:
            return None
        if left == staying:
            break
        staying = left
    return {gap: min(position, latest_release(program, gap)) for gap, position in cache.released.items()}


def transfers(program: StepProgram, fetched: Mapping[Gap, int], released: Mapping[Gap, int]) -> list[Transfer]:
    """Return transfers that are awaited where the memory or the tensor is needed.

    Copies start after the first use at which the tensor could have left and after which it is not written. So a copy
    starts no later where a larger budget lets the tensor stay until a later gap. A copy of a forward graph ends with
    it.
    """
    starts: dict[Gap, int] = {}
    before: Gap | None = None
    for gap in sorted(fetched, key=lambda g: (g.tensor, g.start)):
        starts[gap] = gap.start + 1
        # One copy serves several gaps of a tensor that is not written between them.
        if before is not None and before.tensor == gap.tensor and not (before.wraps or gap.wraps):
            written = any(
                gap.tensor in program.op(program.steps[p]).writes
                for p in program.touches[gap.tensor]
                if before.start < p <= gap.start
            )
            if not written:
                starts[gap] = starts[before]
        before = gap
    # A copy that starts in forward is done by its end.
    boundary = 0 if program.graph.whole_step else program.end_of_forward
    return [
        Transfer(gap, starts[gap], at, fetched[gap], gap.end, copied=boundary if starts[gap] < boundary < at else None)
        for gap, at in released.items()
    ]


def smallest(program: StepProgram, options: Iterable[Mapping[Gap, int]], live: Positions) -> Floor:
    """Return the least memory, in bytes, that one of `options` needs; each has the form of `fetched` above."""
    return floor_of(program, min(options, key=lambda fetched: int(without(program, fetched, live).max(initial=0))))


def without(program: StepProgram, fetched: Mapping[Gap, int], live: Positions) -> Positions:
    """Return the live bytes with each tensor of `fetched` away from the first step of its gap until it returns."""
    live = live.copy()
    for gap, back in fetched.items():
        nbytes = program.graph.tensors[gap.tensor].nbytes
        if gap.wraps:
            live[gap.start + 1 :] -= nbytes
            live[:back] -= nbytes
        else:
            live[gap.start + 1 : back] -= nbytes
    return live


class _Cache:
    """One step with an LRU cache of the movable tensors. `released` has those that left, and before which step."""

    def __init__(
        self, program: StepProgram, fetched: Mapping[Gap, int], live: Positions, budget_bytes: int, always: bool
    ) -> None:
        self.tensors = program.graph.tensors
        self.length = program.length
        self.budget_bytes = budget_bytes
        self.always = always
        fetched = {gap: back for gap, back in fetched.items() if gap.wraps or back > gap.start + 1}  # others stay
        self.live = without(program, fetched, live)
        self.entering: dict[int, list[Gap]] = defaultdict(list)
        self.returning: dict[int, list[Gap]] = defaultdict(list)
        for gap in sorted(fetched, key=lambda g: (g.start, g.tensor)):
            self.entering[gap.start + 1].append(gap)
            self.returning[fetched[gap]].append(gap)
        self.wrapping: Sequence[Gap] = [gap for gap in sorted(fetched, key=lambda g: (g.start, g.tensor)) if gap.wraps]
        self.released: dict[Gap, int] = {}
        self.queue: OrderedDict[Gap, int] = OrderedDict()  # what could go, least recently used first, with its bytes
        self.queued_bytes = 0

    def run(self, staying: Sequence[Gap]) -> Sequence[Gap] | None:
        """Run a step, and return the persistent tensors there at its end, or None if some step does not fit.

        It begins with the persistent tensors `staying` still there.
        """
        self.queue.clear()
        self.queued_bytes = 0
        # The others are gone since the step before; when in it, its end will show.
        self.released = dict.fromkeys((gap for gap in self.wrapping if gap not in staying), self.length)
        for gap in staying:
            self._enter(gap)
        for position in range(self.length):
            for gap in self.returning[position]:
                if gap in self.queue:
                    self._leave(gap, position if self.always else None)
            for gap in self.entering[position]:
                self._enter(gap)
            while self.queue and self.live[position] + self.queued_bytes > self.budget_bytes:
                self._leave(next(iter(self.queue)), position)
            if self.live[position] > self.budget_bytes:
                return None
        for gap in self.entering[self.length]:
            self._enter(gap)
        return [gap for gap in self.wrapping if gap in self.queue]

    def _enter(self, gap: Gap) -> None:
        self.queue[gap] = self.tensors[gap.tensor].nbytes
        self.queued_bytes += self.queue[gap]

    def _leave(self, gap: Gap, released: int | None) -> None:
        """Take `gap` off the queue. `released` is the step by which its tensor has left; None: it stays."""
        self.queued_bytes -= self.queue.pop(gap)
        if released is not None:  # what goes at the start of a step was not there since the end of the one before
            self.released[gap] = self.length if gap.wraps and released <= gap.end else released
