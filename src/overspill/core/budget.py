"""A device memory budget, as the user wrote it and in bytes.

It is parsed once. A relative budget is resolved to bytes once the step is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .errors import RequestError
from .units import is_share, parse_bytes, parse_with_unit

_UNIT = 1 << 40
_LEAST_TYPED, _LEAST_GIVEN = 1 << 20, 1000
"""Bytes of a typed budget and of an int from which on a number without a unit is taken for bytes."""
SMALLEST = "smallest"


@dataclass(frozen=True)
class Budget:
    """A memory budget: bytes, a share of unmanaged use, or the smallest that works.

    If no field is set, the budget is all of the device's memory.
    """

    nbytes: int | None = None
    """The budget in bytes."""
    share: float | None = None
    """The budget as a share of the bytes that the step takes unmanaged, from 0 to 1."""
    smallest: bool = False
    """Whether it is the smallest budget that works."""

    @property
    def is_relative(self) -> bool:
        """Whether its bytes depend on the step."""
        return self.share is not None or self.smallest

    @classmethod
    def parse(cls, asked: str | float | Budget | None) -> Budget:
        """Parse `8GiB`, bytes, `0.5`, `50%`, `smallest`, or None (the whole device).

        Raises RequestError if it is not a positive size, or is a share above 1.
        """
        if isinstance(asked, Budget):
            return asked
        if asked is None:
            return cls()
        if asked == SMALLEST:
            return cls(smallest=True)
        # A share of at most 1, or a size.
        if is_share(asked):
            parse_bytes(asked, of_bytes=_UNIT)  # refuses a share of nothing
            text = str(asked).strip()
            share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
            if share > 1:
                raise RequestError(
                    f"a budget of {text} is more than all that the step takes unmanaged; give 100% at most, or a size "
                    "like 12GiB"
                )
            return cls(share=share)
        least_bytes = _LEAST_TYPED if isinstance(asked, str) else _LEAST_GIVEN
        return cls(nbytes=parse_with_unit(asked, least_bytes, share=True))

    def bytes_of(self, unmanaged_bytes: Callable[[], int], device_bytes: int, floor_bytes: Callable[[], int]) -> int:
        """Return the budget in bytes, on a device with `device_bytes` of memory.

        `unmanaged_bytes` is called only for a share, `floor_bytes` only for the smallest budget. Raises RequestError if
        a share comes to zero bytes.
        """
        if self.nbytes is not None:
            return self.nbytes
        if self.smallest:
            return floor_bytes()
        if self.share is None:
            return device_bytes
        nbytes = int(self.share * unmanaged_bytes())
        if nbytes <= 0:
            raise RequestError(
                f"a budget of {self.share:g} of what the step takes unmanaged is no positive size; take a larger "
                "share, or a size like 2GiB"
            )
        return nbytes
