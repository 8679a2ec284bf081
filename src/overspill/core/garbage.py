"""Spare Python's memory management: no garbage collection for a while, and one piece of memory for deep calls."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def without_collection() -> Iterator[None]:
    """Turn off garbage collection inside the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def deep_calls(work: Callable[P, R]) -> Callable[P, R]:
    """Return `work` with memory for the frames of deep calls, in one piece.

    CPython keeps frames in pieces of 16 KiB. A call at the end of one maps another, and its return unmaps it. Tracing
    makes millions of calls at such a depth, which takes up to a tenth of its time. A frame that asks for much gets a
    piece of the next power of two, and what it leaves of it serves the calls below.
    """

    @wraps(work)
    def with_memory(*args: P.args, **kwargs: P.kwargs) -> R:
        found: R = _call(work, args, kwargs)
        return found

    return with_memory


def _call(work: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return work(*args, **kwargs)


_call.__code__ = _call.__code__.replace(co_stacksize=140_000)  # of 8 bytes, never written: half of 2 MiB
