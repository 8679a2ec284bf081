"""What live pools are told of blocks before they come: how long they stay, by the classes of Dymem's Algorithm 3."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType

from torch.fx.node import has_side_effect

from overspill.core import Graph, Mobility, Phase, Schedule, TensorKind, Verb
from overspill.simulate import trace_of

with suppress(ImportError):  # where the native code is not there, nothing here is called
    from . import _live

UNPLANNED = 3
"""The group, beside those of Mobility, of a block that no plan has: it stays out of the way of those that one has."""

Made = tuple[tuple[tuple[int, int], ...], int]
"""What an instruction makes: the bytes and the group of each block, and the group of what no plan knows."""
SCRATCH_ONLY: Made = ((), int(Mobility.TEMPORARY))
"""Of an instruction that makes nothing. Scratch goes when the op is done."""
MadeBy = Mapping[int, Made]
"""The same by the instruction's position in the schedule."""
NOTHING_TOLD: MadeBy = MappingProxyType({})
"""Where no pool wants to know."""


def staying(graph: Graph) -> set[str]:
    """The names of the tensors that stay beyond the step."""
    return {t.name for t in graph.tensors if t.persistent or t.kind is TensorKind.GRADIENT}


def groups_of(
    graph: Graph, schedule: Schedule, leaving: Collection[int] = (), scratch: int = Mobility.TEMPORARY
) -> MadeBy:
    """What the instruction at each position makes.

    What stays beyond the step (weights, gradients, the tensors `leaving`) is RECLAIMED: a main space that no block
    outlives can be made anew in another size. Of two blocks of one size the one that stays longer counts. `scratch` is the
    group of what no plan knows.
    """
    stays = staying(graph) | {graph.tensors[tensor].name for tensor in leaving}
    blocks: dict[int, dict[int, int]] = defaultdict(dict)
    for block in trace_of(graph, schedule).blocks:
        if block.nbytes:
            group = Mobility.RECLAIMED if block.name in stays else block.mobility
            of_size = blocks[block.start]
            of_size[block.nbytes] = max(of_size.get(block.nbytes, 0), int(group))
    made = {position: (tuple(found.items()), int(scratch)) for position, found in blocks.items()}
    for position, instruction in enumerate(schedule.instructions):
        made.setdefault(position, ((), int(scratch)))
        if instruction.verb is Verb.RUN and graph.ops[instruction.target].phase is Phase.UPDATE:
            # An optimizer makes small things, as its count of steps, that stay and that no plan knows.
            made[position] = (made.get(position, SCRATCH_ONLY)[0], UNPLANNED)
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
