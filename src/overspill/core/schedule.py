"""The Schedule: a total order of instructions. `simulate/check.py` defines what each of them means."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from .saved import Saved


class Verb(StrEnum):
    """What an instruction does. Offload and Prefetch only start a transfer; the Awaits block the compute stream."""

    RUN = "run"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    AWAIT_OFFLOAD = "await_offload"
    PREFETCH = "prefetch"
    AWAIT_PREFETCH = "await_prefetch"
    FREE = "free"


@dataclass(frozen=True)
class Instruction:
    """A verb and its target: an op id for Run and Recompute, a tensor id for the others.

    `algorithm` says which of the op's algorithms Run and Recompute take; 0 is the fastest.
    """

    verb: Verb
    target: int
    algorithm: int = 0


@dataclass(frozen=True)
class Schedule(Saved):
    """What to do in one step, in order, as `policy` planned it under `budget_bytes` (None: no budget).

    When compute waits for a transfer is a property of the schedule, and what the papers differ in: an Await at the
    end of every layer (vDNN, Fig. 9), where the memory is needed or the copy is done (Dymem, §3.2.1), or at the end
    of a phase. `stored` are the persistent tensors that are in the store, and not on the device, between two steps; of
    what no op writes, the store has a copy wherever it is.
    """

    policy: str
    instructions: tuple[Instruction, ...]
    budget_bytes: int | None = None
    stored: tuple[int, ...] = ()

    @cached_property
    def counts(self) -> Counter[Verb]:
        """How many instructions there are of each verb."""
        return Counter(instruction.verb for instruction in self.instructions)

    def targets(self, verb: Verb) -> tuple[int, ...]:
        """The targets of all instructions of `verb`, in order."""
        return tuple(i.target for i in self.instructions if i.verb is verb)
