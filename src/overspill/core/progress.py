"""Progress of long work: whoever shows it asks for it, and the work tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)


@contextmanager
def progress_to(tell: Callable[[str], None]) -> Iterator[None]:
    """Pass what work inside the block says of its progress to `tell`."""
    token = _TOLD.set(tell)
    try:
        yield
    finally:
        _TOLD.reset(token)


def progress(text: str) -> None:
    """Say what is done now, to whoever asked."""
    if (tell := _TOLD.get()) is not None:
        tell(text)
