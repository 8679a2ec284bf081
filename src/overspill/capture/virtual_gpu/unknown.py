"""What stands for the value of a tensor that was never computed, and the error for a program that needs it."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Self

import torch

from overspill.core.errors import UnsupportedError

from .assumptions import goes_on

_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parents[2]) + os.sep


class UnknownNumber(float):
    """The value of a tensor that was never computed: prints, adds and averages, but decides nothing."""

    def __new__(cls, *_: object) -> Self:
        """One that is finite to whoever asks the C library."""
        return super().__new__(cls, 1.0)

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "unknown"

    def _unknown(self, *_: object) -> UnknownNumber:
        return UnknownNumber()

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __neg__ = __pow__ = __rpow__ = __abs__ = __floordiv__ = __mod__ = __round__ = _unknown  # type: ignore[assignment]

    def _decides(self, *_: object) -> bool:
        if (answer := goes_on(sys._getframe(1))) is not None:
            return answer
        raise data_dependent()

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __int__ = __index__ = _decides
    __hash__ = float.__hash__


def data_dependent() -> UnsupportedError:
    """The error for a program whose way depends on a value; it names the user's line."""
    where = user_line(sys._getframe(1))
    return UnsupportedError(
        f"{where} needs the value of a tensor, which an estimate does not compute; "
        "take the branch on something known beforehand (shapes, step numbers), or estimate the part without it"
    )


def user_line(frame: FrameType | None, lines: Mapping[FrameType, int] | None = None) -> str:
    """`file:line, in function: source` of the innermost frame outside torch and Overspill.

    `lines` are those at which frames were, for frames that have gone on since.
    """
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    if frame is None:
        return "the program"
    file, line = frame.f_code.co_filename, (lines or {}).get(frame, frame.f_lineno)
    linecache.checkcache(file)
    return f"{file}:{line}, in {frame.f_code.co_name}: `{linecache.getline(file, line).strip()}`"
