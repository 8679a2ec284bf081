"""Numbers that were never computed, and the error for needing one."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from overspill.core.errors import UnsupportedError

from .assumptions import goes_on
from .frames import user_line
from .invented import FRACTION, WHOLE, Invented, with_which_no_error_follows


def _comparing(comparison: Callable[[Any, Any], Any]) -> Callable[[UnknownNumber, Any], Any]:
    """Return a comparison of an unknown number with another."""

    def compare(one: UnknownNumber, other: Any) -> Any:
        theirs = float(other) if isinstance(other, UnknownNumber) else other
        return one._decided(sys._getframe(1), lambda: comparison(float(one), theirs))

    return compare


def _counting(operation: Callable[[Any, Any], Any]) -> Callable[[UnknownNumber, Any], UnknownNumber]:
    """Return an operation with another number; its result is a whole number if both are."""

    def count(one: UnknownNumber, other: Any) -> UnknownNumber:
        theirs = other._whole if isinstance(other, UnknownNumber) else other
        if (
            one._whole is None
            or type(theirs) is not int
            or (not theirs and operation in {operator.floordiv, operator.mod})
        ):
            return one._unknown()
        return UnknownNumber(operation(one._whole, theirs), one._invented)

    return count


class UnknownNumber(float):
    """A value that was never computed: it prints and adds, but cannot be compared.

    With `invented` it has a placeholder value, and the lines that read it are recorded there.
    """

    _invented: Invented | None
    _whole: int | None

    def __new__(cls, value: float = FRACTION, invented: Invented | None = None) -> Self:
        """Make a number that is finite to C libraries, and a count if `value` is whole."""
        made = super().__new__(cls, value)
        made._invented = invented
        made._whole = value if isinstance(value, int) else None
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

    __truediv__ = __rtruediv__ = __neg__ = __pow__ = __rpow__ = __abs__ = __round__ = _unknown  # type: ignore[assignment]
    __add__, __radd__, __mul__, __rmul__ = (
        _counting(c) for c in (operator.add, operator.add, operator.mul, operator.mul)
    )
    __sub__, __floordiv__, __mod__ = (_counting(c) for c in (operator.sub, operator.floordiv, operator.mod))
    __rsub__ = _counting(lambda one, other: other - one)

    def _decided(self, frame: FrameType, answer: Callable[[], Any]) -> Any:
        """Return the answer to the program at `frame`, if it has any. Raises UnsupportedError otherwise."""
        if (known := goes_on(frame)) is not None:
            return known
        if self._invented is not None:
            return self._invented.decide(frame, answer())
        if (needed := with_which_no_error_follows(frame)) is None:
            raise data_dependent()
        return needed

    def __bool__(self) -> bool:
        return bool(self._decided(sys._getframe(1), lambda: True))

    def __int__(self) -> int:
        return self._counted(sys._getframe(1))

    def __index__(self) -> int:
        """Return a size or position: a placeholder value may decide how much memory is taken."""
        made = self._counted(sys._getframe(1))
        if self._invented is not None:
            self._invented.sized(sys._getframe(1))
        return made

    def _counted(self, frame: FrameType) -> int:
        """Return the whole number for the program at `frame`. Raises UnsupportedError without placeholder values."""
        if (known := goes_on(frame)) is not None:
            return known
        if self._invented is None:
            raise data_dependent()
        self._invented.read(frame)
        return WHOLE if self._whole is None else self._whole

    __lt__, __le__, __gt__, __ge__ = (_comparing(c) for c in (operator.lt, operator.le, operator.gt, operator.ge))
    __eq__, __ne__ = _comparing(operator.eq), _comparing(operator.ne)
    __hash__ = float.__hash__


def data_dependent() -> UnsupportedError:
    """Return the error for branching on an unknown value, with the user's line."""
    where = user_line(sys._getframe(1))
    return UnsupportedError(
        f"{where} needs the value of a tensor, which an estimate does not compute; "
        "take the branch on something known beforehand (shapes, step numbers), or estimate the part without it"
    )
