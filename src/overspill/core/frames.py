"""Lines of a user's Python behind ops, as plain data that ops share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

PACKAGES = ("site-packages", "dist-packages")
"""Folders of installed packages; there may be several: an environment's, the system's, the user's."""


def in_package(file: str) -> bool:
    """Return whether the file at a path is that of an installed package."""
    return any(f"{os.sep}{name}{os.sep}" in file for name in PACKAGES)


@dataclass(frozen=True)
class Frame:
    """One line of the user's Python in a call stack."""

    file: str
    line: int
    function: str
    caller: int = -1
    """The frame that called it, by its earlier position in the same tuple of frames; -1: outermost."""
    backward: bool = False
    """Whether the op is the backward of that line."""

    def __str__(self) -> str:
        """Return it as `model.py:42 forward`, without the file's folder."""
        of = "backward of " if self.backward else ""
        return f"{of}{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line} {self.function}"


class FrameTable:
    """Frames by number, each once."""

    def __init__(self) -> None:
        self._frames: list[Frame] = []
        self._numbers: dict[Frame, int] = {}

    def number(self, frame: Frame) -> int:
        """Return the number of a frame; its caller must have one already."""
        number = self._numbers.setdefault(frame, len(self._frames))
        if number == len(self._frames):
            self._frames.append(frame)
        return number

    def found(self) -> tuple[Frame, ...]:
        """Return all frames, by number."""
        return tuple(self._frames)

    def __getitem__(self, number: int) -> Frame:
        """Return the frame with this number."""
        return self._frames[number]


def stack_of(frames: Sequence[Frame], innermost: int) -> tuple[Frame, ...]:
    """Return the frame at `innermost` and its callers, outermost first; nothing for -1."""
    found: list[Frame] = []
    at, above = innermost, len(frames)
    while 0 <= at < above:  # callers may form a cycle in a hand-written file
        found.append(frames[at])
        at, above = frames[at].caller, at
    return tuple(reversed(found))


def source_of(frames: Sequence[Frame], innermost: Sequence[int]) -> str:
    """Return the line that ran an op, as `model.py:42 forward`.

    For a fused kernel it is the first line, with `and 2 more`. It is empty if none is known.
    """
    lines = list(dict.fromkeys(str(frames[at]) for at in innermost if 0 <= at < len(frames)))
    return lines[0] + (f" and {len(lines) - 1} more" if len(lines) > 1 else "") if lines else ""
