"""Find the user's Python line of each recorded op; backward ops get forward's.

Relies on the next autograd node being made, and numbered, before its op runs.
"""

from __future__ import annotations

import sys
from bisect import bisect_right

from overspill.capture.frames import NOBODYS, FrameNumbers
from overspill.core import Frame
from overspill.pytorch.autograd import next_sequence_number


class OpLines:
    """The lines of ops as they run; none, at no cost, unless `wanted`."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._frames = FrameNumbers()
        # Autograd nodes, by number, up to the next number in the list were made by the line at the same index.
        self._nodes = [-1]
        self._made_by = [-1]

    def found(self) -> tuple[Frame, ...]:
        """Return all lines, by number."""
        return self._frames.found()

    def enter(self) -> None:
        """Note that a module's forward begins; call this directly in its hook."""
        if self._wanted:
            self._frames.enter(sys._getframe(1))

    def leave(self) -> None:
        """Note that the innermost module's forward ends."""
        if self._wanted:
            self._frames.leave()

    def now(self, node: int | None, *, in_backward: bool) -> int:
        """Return the number of the line that the running op comes from; -1 for none.

        `node`: the number of the autograd node that runs it, if any.
        """
        if not self._wanted:
            return -1
        frame = self._frames.running(sys._getframe(2), in_backward=in_backward)
        if frame == NOBODYS:
            frame = self._frames.backward_of(self._maker(node))
            if frame < 0:  # a gradient that is added up, say: the line that called backward
                frame = self._frames.running(sys._getframe(2))
        number = next_sequence_number()
        if number > self._nodes[-1]:
            self._nodes.append(number)
            self._made_by.append(frame)
        return frame

    def _maker(self, node: int | None) -> int:
        """Return the line that made an autograd node; -1 for none."""
        made = len(self._nodes) if node is None or node < 0 else bisect_right(self._nodes, node)
        return self._made_by[made] if made < len(self._nodes) else -1
