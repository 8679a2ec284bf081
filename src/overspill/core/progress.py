"""Progress of long work: whoever shows it asks for it, and the work tells."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .text import spelled_out

_TOLD: ContextVar[Callable[[str], None] | None] = ContextVar("told", default=None)
_CLEAR = "\r\x1b[K"
"""What empties the line of a terminal."""


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


@contextmanager
def shown_in_terminal(what: str) -> Iterator[None]:
    """Show `what` and the progress of work inside the block as one line of a terminal, which vanishes in the end.

    Nothing is shown if somebody asked for the progress already.
    """
    if not _may_print():
        yield
        return

    def show(now: str) -> None:
        line = spelled_out(f"overspill: {now}")[: shutil.get_terminal_size().columns - 1]
        # What is printed meanwhile overwrites the line.
        sys.stderr.write(f"{_CLEAR}{line}\r")
        sys.stderr.flush()

    show(what)
    with progress_to(lambda now: show(f"{what}: {now}")):
        try:
            yield
        finally:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def tell_terminal(text: str) -> None:
    """Print a line that stays, if standard error is a terminal and no command has it."""
    if _may_print():
        sys.stderr.write(f"overspill: {text}\n")


def _may_print() -> bool:
    """Return whether standard error is a terminal that is free, in the first of a job's processes."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    return _TOLD.get() is None and first and sys.stderr is not None and sys.stderr.isatty()
