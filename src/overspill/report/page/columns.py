"""Numbers, lines of Python and shapes as the columns of a page's views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from overspill.core import Frame

from .sections import Frames, Integers


def frames_of(frames: Sequence[Frame]) -> Frames:
    """Return lines of Python as columns."""
    files = {file: number for number, file in enumerate(dict.fromkeys(frame.file for frame in frames))}
    return Frames(
        files=tuple(files),
        file=integers(files[frame.file] for frame in frames),
        line=integers(frame.line for frame in frames),
        function=[frame.function for frame in frames],
        caller=integers(frame.caller for frame in frames),
        backward=integers(frame.backward for frame in frames),
    )


def shape_of(shape: Sequence[int], dtype: str) -> str:
    """Return a tensor's shape and dtype for a reader, as `32x64 float32`.

    The text is empty where the shape is unknown.
    """
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}" if dtype else ""


def integers(numbers: Iterable[int]) -> Integers:
    """Return numbers as a column of 64-bit integers."""
    return np.fromiter(numbers, dtype=np.int64)


def columns_of(rows: Sequence[Sequence[int]]) -> tuple[Integers, Integers]:
    """Return rows of numbers as two columns: where each row begins, and the numbers of all rows."""
    first = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return first, integers(number for row in rows for number in row)
