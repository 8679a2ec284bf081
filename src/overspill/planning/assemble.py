"""Turn a program and its transfers into a Schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from overspill.core import Instruction, Schedule, Verb

from .step_program import Gap, ProgramStep, StepProgram


@dataclass(frozen=True)
class Transfer:
    """One swap of a gap's tensor to the store and back.

    Fields are the steps before which each part happens: gap.start <= offload <= release <= prefetch <= arrive <=
    gap.end. In a gap that wraps, the way back comes at the start of the step and the way out at its end. A copy may
    start before the gap, at an earlier use after which its values stay valid.
    """

    gap: Gap
    offload: int
    release: int
    """The offload is awaited, then the device copy is freed."""
    prefetch: int
    arrive: int
    """The prefetch is awaited."""
    copied: int | None = None
    """The offload is awaited here, at a step before `release`; None: at `release`."""


def assemble(
    program: StepProgram,
    transfers: Collection[Transfer],
    policy: str,
    budget_bytes: int | None,
    held: Collection[int] = (),
) -> Schedule:
    """Return the Schedule of `program` with `transfers`; tensors in `held` are freed only after backward."""
    assembly = _Assembly(program, transfers, frozenset(held))
    return Schedule(policy, assembly.instructions(), budget_bytes, tuple(sorted(assembly.stored_between_steps)))


class _Assembly:
    def __init__(self, program: StepProgram, transfers: Iterable[Transfer], held: frozenset[int]) -> None:
        self.program = program
        self.tensors = program.graph.tensors
        transfers = list(transfers)
        self.stored_between_steps = frozenset(t.gap.tensor for t in transfers if t.gap.wraps)
        self.present = {t.id for t in self.tensors if t.persistent} - self.stored_between_steps
        # Tensors of which the store has a copy, or is getting one.
        self.stored = {*self.stored_between_steps, *program.graph.read_only}
        self.leaving: set[int] = set()
        self.offloads: dict[int, list[Transfer]] = defaultdict(list)
        self.copies: dict[int, list[Transfer]] = defaultdict(list)
        self.releases: dict[int, list[Transfer]] = defaultdict(list)
        self.prefetches: dict[int, list[Transfer]] = defaultdict(list)
        self.arrivals: dict[int, list[Transfer]] = defaultdict(list)
        # Transfers by the step before which each part happens.
        for transfer in sorted(transfers, key=lambda t: (t.gap.start, t.gap.tensor)):
            self.offloads[transfer.offload].append(transfer)
            if transfer.copied is not None:
                self.copies[transfer.copied].append(transfer)
            self.releases[transfer.release].append(transfer)
            self.prefetches[transfer.prefetch].append(transfer)
            self.arrivals[transfer.arrive].append(transfer)
        for waiting in self.prefetches.values():
            waiting.sort(key=lambda t: t.arrive)
        self.frees = self._plan_frees(held)
        self.made: list[Instruction] = []

    def _plan_frees(self, held: frozenset[int]) -> dict[int, list[int]]:
        """Return the tensors to free after each step: at their last touch, or when dropped to be recomputed."""
        frees: dict[int, list[int]] = defaultdict(list)
        last_backward = self.program.end_of_backward - 1
        for tensor in self.tensors:
            touches = self.program.touches[tensor.id]
            if tensor.persistent or not touches or touches[-1] >= self.program.length:
                continue
            frees[max(touches[-1], last_backward) if tensor.id in held else touches[-1]].append(tensor.id)
        for gap in self.program.gaps:
            if gap.rematerialized:
                frees[gap.start].append(gap.tensor)
        return frees

    def instructions(self) -> tuple[Instruction, ...]:
        """Return all instructions, in order."""
        moving = self.offloads.keys() | self.copies.keys() | self.releases.keys() | self.prefetches.keys()
        moving |= self.arrivals.keys()
        for position, step in enumerate(self.program.steps):
            if position in moving:
                self._move(position)
            self._run(step)
            for tensor in self.frees.get(position, ()):
                if tensor in self.present:
                    self._free(tensor)
        self._move(self.program.length)
        return tuple(self.made)

    def _move(self, position: int) -> None:
        # Offloads start first, for the link; then memory is freed, then taken.
        for transfer in self.offloads[position]:
            if (tensor := transfer.gap.tensor) not in self.stored:  # a second swap finds its copy in the store
                self.stored.add(tensor)
                self.leaving.add(tensor)
                self.made.append(Instruction(Verb.OFFLOAD, tensor))
        for transfer in self.copies[position]:
            self._await_copy(transfer.gap.tensor)
        for transfer in self.releases[position]:
            self._await_copy(transfer.gap.tensor)
            self._free(transfer.gap.tensor)
        for transfer in self.prefetches[position]:
            self.present.add(transfer.gap.tensor)
            self.made.append(Instruction(Verb.PREFETCH, transfer.gap.tensor))
        for transfer in self.arrivals[position]:
            self.made.append(Instruction(Verb.AWAIT_PREFETCH, transfer.gap.tensor))

    def _await_copy(self, tensor: int) -> None:
        if tensor in self.leaving:
            self.leaving.remove(tensor)
            self.made.append(Instruction(Verb.AWAIT_OFFLOAD, tensor))

    def _run(self, step: ProgramStep) -> None:
        op, algorithm = self.program.op(step), self.program.algorithm(step)
        if not step.recompute:
            self.present.update(op.writes)
            self.stored.difference_update(op.writes)  # their copies in the store are out of date
            self.made.append(Instruction(Verb.RUN, op.id, algorithm))
            return
        extra = [t for t in op.recompute_writes if t not in self.present and t not in step.makes]
        self.present.update(op.recompute_writes)
        self.made.append(Instruction(Verb.RECOMPUTE, op.id, algorithm))
        for tensor in extra:
            self._free(tensor)

    def _free(self, tensor: int) -> None:
        self.present.discard(tensor)
        self.made.append(Instruction(Verb.FREE, tensor))
