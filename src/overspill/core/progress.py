"""Progress of long work: whoever shows it asks for it, and the work tells."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from .text import spelled_out

LONG_SECONDS = 10.0
"""Work that no terminal shows is logged, once, when it has taken so long."""
_LOG = logging.getLogger("overspill")
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
def progress_under(what: str) -> Iterator[None]:
    """Put `what` before all that work inside the block says of its progress, and say it at once."""
    if (tell := _TOLD.get()) is None:
        yield
        return
    tell(what)
    with progress_to(lambda now: tell(f"{what}: {now}")):
        yield


@contextmanager
def shown_in_terminal(what: str) -> Iterator[None]:
    """Show `what` and the progress of work inside the block as one line of a terminal, which vanishes in the end.

    Nothing is shown if somebody asked for the progress already. Without a terminal, long work logs one line.
    """
    if not _may_print():
        with progress_to(_TOLD.get() or _logged_when_long(what)):
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


def _logged_when_long(what: str) -> Callable[[str], None]:
    """Return what hears the progress of `what`, and logs one line of it after LONG_SECONDS."""
    begun, logged = time.monotonic(), False

    def tell(now: str) -> None:
        nonlocal logged
        seconds = time.monotonic() - begun
        if not logged and seconds >= LONG_SECONDS and _is_first():
            logged = True
            _LOG.warning("%s takes more than %.0f s (%s)", what, LONG_SECONDS, now)

    return tell


def tell_terminal(text: str) -> None:
    """Print a line that stays, if standard error is a terminal and no command has it."""
    if _may_print():
        sys.stderr.write(f"overspill: {text}\n")


def _may_print() -> bool:
    """Return whether standard error is a terminal that is free, in the first of a job's processes."""
    return _TOLD.get() is None and _is_first() and sys.stderr is not None and sys.stderr.isatty()


def _is_first() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"
