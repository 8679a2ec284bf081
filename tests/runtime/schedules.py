"""Schedules drawn at random, which the reference machine accepts, and the policy that gives them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

from overspill.core import Graph, Schedule
from overspill.core.errors import InvalidScheduleError
from overspill.planning.assemble import Transfer, assemble
from overspill.planning.gaps import earliest_return, latest_release, swappable_gaps
from overspill.planning.step_program import Gap, StepProgram
from overspill.policies import POLICIES
from overspill.policies.base import Policy
from overspill.simulate import check

TRIES = 20


def draw(graph: Graph, random: Random) -> Schedule:
    """A valid schedule: some tensors are recomputed, some swapped, some freed late, each at any time that may be."""
    for _ in range(TRIES):
        made = _drawn(graph, random)
        try:
            check(graph, made)
        except InvalidScheduleError as error:
            refused = error  # a recomputation may be of what has been updated since
        else:
            return made
    raise refused


def _drawn(graph: Graph, random: Random) -> Schedule:
    able = [t for op in graph.ops for t in op.recompute_writes if not graph.tensors[t].persistent]
    again, dropped, moved, late = (random.random() for _ in range(4))
    recompute = {t for t in able if t not in graph.returned and random.random() < again * 0.6}
    program = StepProgram(graph, recompute, drop_after_use={t for t in recompute if random.random() < dropped})
    transfers = [_transfer(program, gap, random) for gap in swappable_gaps(program) if random.random() < moved]
    held = [t.id for t in graph.tensors if not graph.whole_step and random.random() < late * 0.2]
    return assemble(program, transfers, Drawn.name, None, held)


def _transfer(program: StepProgram, gap: Gap, random: Random) -> Transfer:
    last = latest_release(program, gap)
    out = random.randint(gap.start + 1, last)
    copied = random.randint(out, last)
    gone = random.randint(copied, last)
    back = random.randint(0 if gap.wraps else max(gone, earliest_return(program, gap)), gap.end)
    return Transfer(gap, out, gone, back, random.randint(back, gap.end), copied)


class Drawn(Policy):
    """Gives another random schedule each time."""

    name, summary, source = "drawn", "a schedule drawn at random", "these tests"
    offloads = recomputes = unlimited = True
    random = Random(0)

    def _plan(self, graph: Graph, *_: Any) -> Schedule:
        return draw(graph, self.random)


@contextmanager
def drawn(seed: int) -> Iterator[str]:
    """The name of the policy, which is there while this lasts."""
    Drawn.random = Random(seed)
    POLICIES._known[Drawn.name] = Drawn
    try:
        yield Drawn.name
    finally:
        del POLICIES._known[Drawn.name]
