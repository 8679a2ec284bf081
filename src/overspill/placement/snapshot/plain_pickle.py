"""Unpickle builtin data alone: anything but numbers, text and collections of them is refused before it runs.

Known limit: a pickle made for it can still take much time or memory.
"""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any, NoReturn

MOST_SHOWN = 100


class ForbiddenError(pickle.UnpicklingError):
    """The pickle contains something other than plain data."""


class PlainUnpickler(pickle.Unpickler):
    """An unpickler without classes and functions."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse `module.name`."""
        shown = f"{module}.{name}"[:MOST_SHOWN]
        raise ForbiddenError("".join(c if c.isprintable() else "?" for c in shown))


def load_plain(content: bytes) -> Any:
    """Return the plain data that the pickle `content` holds.

    Raises ForbiddenError if it contains more than that, and the errors of the unpickler for anything that is no pickle.
    """
    # Garbage collection would double the time for millions of objects.
    collecting = gc.isenabled()
    gc.disable()
    try:
        return PlainUnpickler(io.BytesIO(content)).load()
    finally:
        if collecting:
            gc.enable()
