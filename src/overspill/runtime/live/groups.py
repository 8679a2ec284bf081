"""What live pools are told of blocks before they come: how long they stay, by the classes of Dymem's Algorithm 3."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from torch.fx.node import has_side_effect

from overspill.core import Graph, Mobility, Phase, TensorKind, Verb
from overspill.plans.plan import Plan
from overspill.simulate import trace_of

with suppress(ImportError):  # where the native code is not there, nothing here is called
    from . import _live

UNPLANNED = 3
"""The group, beside those of Mobility, of a block that no plan has: it stays out of the way of those that one has."""

Made = tuple[tuple[tuple[int, int], ...], int]
"""What an instruction makes: the bytes and the group of each block, and the group of what no plan knows."""
MadeBy = Mapping[int, Made]
"""The same by the instruction's position in the schedule."""
NOTHING_TOLD: MadeBy = MappingProxyType({})
"""Where no pool wants to know."""


def staying(graph: Graph) -> set[str]:
    """The names of the tensors that stay beyond the step."""
    return {t.name for t in graph.tensors if t.persistent or t.kind is TensorKind.GRADIENT}


class Telling:
    """What a lowered program tells a pool as it goes on: only what is not as it was before."""

    def __init__(self, made: MadeBy) -> None:
        self._made = made
        self._told: Made | None = None

    def before(self, position: int, verb: Verb) -> Made | None:
        """What is to be told before the instruction at a position; None where nothing is."""
        if not self._made or verb not in (Verb.RUN, Verb.RECOMPUTE, Verb.PREFETCH):
            return None
        told, self._told = self._told, self._made[position]
        return None if self._told == told else self._told

    def forget(self) -> None:
        """As if nothing had been told: another function begins."""
        self._told = None


def groups_of(plan: Plan, leaving: Collection[int] = (), scratch: int = Mobility.TEMPORARY) -> MadeBy:
    """What the instruction at each position of `plan` makes.

    What stays beyond the step (weights, gradients, the tensors `leaving`) is RECLAIMED: a main space that no block
    outlives can be made anew in another size. Of two blocks of one size the one that stays longer counts. `scratch` is the
    group of what no plan knows.
    """
    graph, instructions = plan.graph, plan.schedule.instructions
    stays = staying(graph) | {graph.tensors[tensor].name for tensor in leaving}
    blocks: dict[int, dict[int, int]] = defaultdict(dict)
    for block in trace_of(graph, plan.schedule, plan.groups).blocks:
        if block.nbytes:
            group = Mobility.RECLAIMED if block.name in stays else block.mobility
            of_size = blocks[block.start]
            of_size[block.nbytes] = max(of_size.get(block.nbytes, 0), int(group))
    made: dict[int, Made] = {}
    for position, instruction in enumerate(instructions):
        # An optimizer makes small things, as its count of steps, that stay and that no plan knows.
        updates = instruction.verb is Verb.RUN and graph.ops[instruction.target].phase is Phase.UPDATE
        made[position] = tuple(blocks.get(position, {}).items()), UNPLANNED if updates else int(scratch)
    return made


def tell_groups(made: Made) -> None:
    """Lowered programs call this before an instruction that makes other blocks than the one before."""
    _live.tell_groups(*made)


has_side_effect(tell_groups)


def tell_group(group: int) -> None:
    """From now on all blocks of this thread are of this group."""
    _live.tell_groups((), group)


def forget_groups() -> None:
    """This thread says nothing of its blocks any more."""
    _live.forget_groups()


@contextmanager
def planned_blocks() -> Iterator[None]:
    """While this lasts a planned program runs in this thread. What comes between its ops is there to stay."""
    tell_group(Mobility.RECLAIMED)
    try:
        yield
    finally:
        forget_groups()


def cpu_bytes() -> tuple[int, int]:
    """The bytes that PyTorch's CPU tensors have asked for so far: of allocators of ours, and of PyTorch's own."""
    return _live.cpu_bytes()
