"""A script's standard streams, and whether a line is open.

A script's last write may leave an open line, as progress bars do.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import sys
from collections.abc import Sequence
from typing import Any

_NEWLINE = ord("\n")


class OpenLines:
    """The standard descriptors that have an open line, of this process and its forks."""

    def __init__(self) -> None:
        self._are = mmap.mmap(-1, mmap.PAGESIZE)

    def wrote(self, number: int, last: int) -> None:
        """Note the `last` byte written to the descriptor `number`."""
        self._are[number] = last != _NEWLINE

    def end(self, descriptors: Sequence[int]) -> None:
        """End the open lines, on copies of the descriptors, so that later output begins a line."""
        for number, descriptor in enumerate(descriptors):
            if self._are[number]:
                with contextlib.suppress(OSError):  # nobody reads it any more
                    os.write(descriptor, b"\n")
                self._are[number] = False


class _Watched(io.FileIO):
    """A standard descriptor for writing."""

    def __init__(self, number: int, lines: OpenLines) -> None:
        super().__init__(number, "w", closefd=False)
        self._lines = lines

    def write(self, data: Any, /) -> int:
        """Write `data`, and return the number of bytes written."""
        written = super().write(data)
        if written:
            self._lines.wrote(self.fileno(), memoryview(data)[written - 1])
        return written


def open_streams(lines: OpenLines) -> None:
    """Create `sys.stdin`, `sys.stdout` and `sys.stderr` again from their descriptors, as at Python's start."""
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    out, err = (io.BufferedWriter(_Watched(number, lines)) for number in (1, 2))
    sys.stdout = io.TextIOWrapper(out, line_buffering=os.isatty(1))
    sys.stderr = io.TextIOWrapper(err, line_buffering=True, errors="backslashreplace")
