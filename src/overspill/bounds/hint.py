"""The relaxation with rules that good plans keep and that some schedules break: no bound, but a better hint."""

from __future__ import annotations

from typing import ClassVar

from overspill.planning.step_program import Gap

from .relaxation import Moves, Relaxation, Trip

DEPTH = 4
"""How far back a recomputation that has to happen between two steps is followed."""


class Hinting(Relaxation):
    """The relaxation in which recomputations come in time, and with all that they need in the same span of steps.

    Also, what cannot move stays, and an input that is held for recomputations serves those of one turn.
    """

    held_apart: ClassVar[bool] = True
    held_whole: ClassVar[bool] = True

    def _may_be_away(self, gap: Gap) -> bool:
        return self.graph.tensors[gap.tensor].movable and super()._may_be_away(gap)

    def _deadline(self, recomputation: tuple[int, int]) -> int:
        return self.due[recomputation]

    def _moved(self, trip: Trip, coming: Moves) -> int:
        moved = self.lp.variable(1.0)
        if trip.held is not None:
            self.lp.row([(moved, 1.0), (trip.held, -1.0)], lower=0.0)
        else:
            again = self._remaking(trip, coming)
            self.lp.row([(moved, 1.0), *([(again, 1.0)] if again is not None else [])], lower=1.0)
        return moved

    def _remaking(self, trip: Trip, coming: Moves) -> int | None:
        """The column of a recomputation of the trip's tensor within it, or None if it cannot be.

        What that reads and could not be on the device during the trip has to come, or be made, in the same window.
        """
        turn, last, end = self.turn[trip.gap], trip.last, trip.gap.end
        if self._column(trip.gap.tensor, turn) is None:
            return None
        first: int | None = None
        pending: list[tuple[int, int | None, int]] = [(trip.gap.tensor, None, 0)]
        made: dict[int, int] = {}
        while pending:
            wanted, reader, depth = pending.pop()
            whole = self._column(wanted, turn)
            op = self.graph.ops[self.graph.producer[wanted]]
            column = made.get(op.id)
            if whole is not None and column is None:
                column = made[op.id] = self.lp.variable(1.0)
                self.lp.row([(whole, 1.0), (column, -1.0)], lower=0.0)
                if depth < DEPTH:
                    reads = [t for t in op.recompute_reads if not self.graph.tensors[t].persistent]
                    pending += [(t, column, depth + 1) for t in reads if not self._room_for(t, last)]
            if reader is None:
                first = column
                continue
            moved = self.lp.variable(1.0)
            coming.append((last, end, [(moved, self._link_times()[1] * self.graph.tensors[wanted].nbytes / self.unit)]))
            by = [(moved, 1.0), *([(column, 1.0)] if column is not None else [])]
            self.lp.row([*by, (reader, -1.0)], lower=0.0)
        seconds = [(c, self.op_seconds[op] / self.total) for op, c in made.items()]
        if seconds:
            self.time.beyond(seconds, last, end)
        return first

    def _room_for(self, tensor: int, position: int) -> bool:
        """Whether `tensor` can be on the device during a step: as one of its own, or beside the least that it needs."""
        op = self.program.op(self.program.steps[position])
        if tensor in op.reads or tensor in op.writes:
            return True
        return bool(self.budget_bytes - self.alone[position] >= self.graph.tensors[tensor].nbytes)
