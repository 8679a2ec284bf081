"""What stands for the value of a tensor that was never computed, and the error for a program that needs it."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from overspill.core.errors import UnsupportedError

from .assumptions import goes_on
from .frames import user_line
from .invented import FRACTION, WHOLE, Invented


def _comparing(comparison: Callable[[Any, Any], Any]) -> Callable[[UnknownNumber, Any], Any]:
    """A comparison of an unknown number with another."""

    def compare(one: UnknownNumber, other: Any) -> Any:
        theirs = float(other) if isinstance(other, UnknownNumber) else other
        return one._decided(sys._getframe(1), lambda: comparison(float(one), theirs))

    return compare


class UnknownNumber(float):
    """The value of a tensor that was never computed: prints, adds and averages, but decides nothing.

    With `invented` it decides by the value that was invented for it, and the line that asks is written down there.
    """

    _invented: Invented | None

    def __new__(cls, value: float = FRACTION, invented: Invented | None = None) -> Self:
        """One that is finite to whoever asks the C library."""
        made = super().__new__(cls, value)
        made._invented = invented
        return made

    def __repr__(self) -> str:
        return "unknown"

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return "unknown"

    def __deepcopy__(self, _: Any) -> Self:
        return self

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def _unknown(self, *_: object) -> UnknownNumber:
        return UnknownNumber(invented=self._invented)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _unknown
    __neg__ = __pow__ = __rpow__ = __abs__ = __floordiv__ = __mod__ = __round__ = _unknown  # type: ignore[assignment]

    def _decided(self, frame: FrameType, answer: Callable[[], Any]) -> Any:
        """What the program at `frame` is told, where anything is."""
        if (known := goes_on(frame)) is not None:
            return known
        if self._invented is None:
            raise data_dependent()
        return self._invented.decide(frame, answer())

    def __bool__(self) -> bool:
        return bool(self._decided(sys._getframe(1), lambda: True))

    def __int__(self) -> int:
        return int(self._decided(sys._getframe(1), lambda: WHOLE))

    def __index__(self) -> int:
        """A number of things, or a position: an invented one may decide how much memory is taken."""
        made = int(self._decided(sys._getframe(1), lambda: WHOLE))
        if self._invented is not None:
            self._invented.sized(sys._getframe(1))
        return made

    __lt__, __le__, __gt__, __ge__ = (_comparing(c) for c in (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _comparing(operator.eq), _comparing(operator.ne)
    __hash__ = float.__hash__


def data_dependent() -> UnsupportedError:
    """The error for a program whose way depends on a value; it names the user's line."""
    where = user_line(sys._getframe(1))
    return UnsupportedError(
        f"{where} needs the value of a tensor, which an estimate does not compute; "
        "take the branch on something known beforehand (shapes, step numbers), or estimate the part without it"
    )
