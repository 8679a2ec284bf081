"""The Schedule: the instructions of one step, in order; `simulate/check.py` defines their meaning."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from .graph import Graph
from .saved import Saved

MOST_TOGETHER = 64
"""Most updates in one call of the optimizer: they share its cost, and more would save little."""


class Verb(StrEnum):
    """Kinds of instructions.

    Offload and Prefetch only start a transfer; the Awaits block the compute stream. Start begins a collective, which
    the Run or Recompute of its op then ends. Without a Start these do both. RunOnHost starts an op of the update in
    host memory, on the copies in the store: the host runs such ops in order. Later transfers of what the op reads or
    writes wait for its end, and nothing else does, not even the end of the step. Small ones that follow one another are
    one call (`Schedule.joined`).
    """

    RUN = "run"
    RECOMPUTE = "recompute"
    START = "start"
    RUN_ON_HOST = "run_on_host"
    OFFLOAD = "offload"
    AWAIT_OFFLOAD = "await_offload"
    PREFETCH = "prefetch"
    AWAIT_PREFETCH = "await_prefetch"
    FREE = "free"


OF_OPS = (Verb.RUN, Verb.RECOMPUTE, Verb.START, Verb.RUN_ON_HOST)
"""Verbs whose target is an op."""


@dataclass(frozen=True)
class Instruction:
    """A verb and its target."""

    verb: Verb
    target: int
    """The id of an op for the verbs `OF_OPS`, of a tensor for the others."""
    algorithm: int = 0
    """The number of the op's algorithm for Run and Recompute; 0 is the fastest."""


@dataclass(frozen=True)
class Schedule(Saved):
    """Instructions of one step, in order, as planned by `policy` under `budget_bytes`.

    The schedule decides when compute waits for a transfer. The papers differ in that: an Await is at the end of every
    layer (vDNN, Fig. 9), where the memory is needed or the copy is done (Dymem, §3.2.1), or at the end of a phase.
    """

    policy: str
    instructions: tuple[Instruction, ...]
    budget_bytes: int | None = None
    """None: no budget."""
    stored: tuple[int, ...] = ()
    """Persistent tensors that are in the store, and not on the device, between two steps.

    Movable tensors that no op writes on the device have a copy in the store anyway.
    """

    @cached_property
    def counts(self) -> Counter[Verb]:
        """Number of instructions of each verb."""
        return Counter(instruction.verb for instruction in self.instructions)

    def joined(self, graph: Graph) -> frozenset[int]:
        """Return the positions of updates on the host that are in one call of the optimizer with the one before."""
        found: list[int] = []
        count = 0
        for position, instruction in enumerate(self.instructions if self.counts[Verb.RUN_ON_HOST] else ()):
            if instruction.verb is not Verb.RUN_ON_HOST or not graph.is_small_on_host(graph.ops[instruction.target]):
                count = 0
                continue
            if count % MOST_TOGETHER:
                found.append(position)
            count += 1
        return frozenset(found)

    def targets(self, verb: Verb) -> tuple[int, ...]:
        """Return the targets of all instructions of `verb`, in order."""
        return tuple(i.target for i in self.instructions if i.verb is verb)
