"""The lines of a user's Python that ran an op, as plain data that many ops share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """A call of the user's Python: `function` of `file` was at `line`.

    `caller` is the frame that had called it, by its position in the same tuple of frames, in which it comes before; -1:
    it is the outermost. `backward`: what ran is not what the line ran, but the backward of that.
    """

    file: str
    line: int
    function: str
    caller: int = -1
    backward: bool = False

    def __str__(self) -> str:
        """For a reader: `model.py:42 forward`, the file without its folders."""
        of = "backward of " if self.backward else ""
        return f"{of}{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} {self.function}"


class FrameTable:
    """Frames by number, each once."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._numbers: dict[Frame, int] = {}

    def number(self, frame: Frame) -> int:
        """The number of a frame, whose caller has one."""
        number = self._numbers.setdefault(frame, len(self._frames))
        if number == len(self._frames):
            self._frames.append(frame)
        return number

    def found(self) -> tuple[Frame, ...]:
        """All of them, by number."""
        return tuple(self._frames)

    def __getitem__(self, number: int) -> Frame:
        """The frame of a number."""
        return self._frames[number]


def stack_of(frames: Sequence[Frame], innermost: int) -> tuple[Frame, ...]:
    """The frame at `innermost` and its callers, the outermost first; none for -1."""
    found: list[Frame] = []
    at, above = innermost, len(frames)
    while 0 <= at < above:  # in a file that somebody wrote callers may go round
        found.append(frames[at])
        at, above = frames[at].caller, at
    return tuple(reversed(found))


def source_of(frames: Sequence[Frame], innermost: Sequence[int]) -> str:
    """The line that ran an op for a reader, as `model.py:42 forward`; of a kernel of several ops the first and how many more.

    Empty where none is known.
    """
    lines = list(dict.fromkeys(str(frames[at]) for at in innermost if 0 <= at < len(frames)))
    return lines[0] + (f" and {len(lines) - 1} more" if len(lines) > 1 else "") if lines else ""
