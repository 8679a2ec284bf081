"""Groups of blocks for live pools, by how long they stay.

The classes are those of Dymem's Algorithm 3.
"""

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
"""The group of blocks that no plan knows, besides those of Mobility; they are kept apart from planned ones."""

Made = tuple[tuple[tuple[int, int], ...], int]
"""Blocks that an instruction allocates: bytes and group of each, and the group of all blocks that no plan knows."""
MadeBy = Mapping[int, Made]
"""`Made` by the instruction's position in the schedule."""
NOTHING_TOLD: MadeBy = MappingProxyType({})
"""For pools without groups."""


def staying(graph: Graph) -> set[str]:
    """Names of the tensors that outlive the step."""
    return {t.name for t in graph.tensors if t.persistent or t.kind is TensorKind.GRADIENT}


class Telling:
    """Emits a group hint only when it changes."""

    def __init__(self, made: MadeBy) -> None:
        self._made = made
        self._told: Made | None = None

    def before(self, position: int, verb: Verb) -> Made | None:
        """The hint before the instruction at a position, or None if unchanged."""
        if not self._made or verb not in (Verb.RUN, Verb.RECOMPUTE, Verb.PREFETCH):
            return None
        told, self._told = self._told, self._made[position]
        return None if self._told == told else self._told

    def forget(self) -> None:
        """Start over: another function begins."""
        self._told = None


def groups_of(plan: Plan, leaving: Collection[int] = (), scratch: int = Mobility.TEMPORARY) -> MadeBy:
    """The blocks and groups of each instruction of `plan`.

    What outlives the step (weights, gradients, the tensors `leaving`) is RECLAIMED: a main space in which no such block
    lies can be resized. Of two blocks of one size the one that stays longer counts. `scratch` is the group of blocks
    that no plan knows.
    """
    graph, instructions = plan.graph, plan.schedule.instructions
    stays = staying(graph) | {graph.tensors[tensor].name for tensor in leaving}
    # The longest-lived group of each size, by the instruction that allocates it.
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
    """Tell the pool the groups of the next blocks.

    Lowered programs call this before an instruction whose blocks differ from the one before.
    """
    _live.tell_groups(*made)


has_side_effect(tell_groups)


def tell_group(group: int) -> None:
    """Put all further blocks of this thread into one group."""
    _live.tell_groups((), group)


def forget_groups() -> None:
    """End this thread's group hints."""
    _live.forget_groups()


@contextmanager
def planned_blocks() -> Iterator[None]:
    """Context around a planned program in this thread.

    Blocks allocated between its ops are there to stay.
    """
    tell_group(Mobility.RECLAIMED)
    try:
        yield
    finally:
        forget_groups()


def cpu_bytes() -> tuple[int, int]:
    """Bytes requested by CPU tensors so far: from our allocators, and PyTorch's own."""
    return _live.cpu_bytes()
