"""Work in a forked copy of this process, which shares what was imported, beside the work of this one."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable
from contextvars import Context
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, Self, TypeVar

from .progress import progress, progress_to

_PAUSE_SECONDS = 1.0
A = TypeVar("A")
R = TypeVar("R")


def can_fork() -> bool:
    """Return whether this process can be copied, and has another processor for the copy."""
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class Forked(Generic[A, R]):
    """A context in whose copy of this process `work(ask)` runs; what it calls `ask` for comes by `result`.

    The copy has the calling thread alone, and no context variables. It ends with the context at the latest.
    """

    def __init__(self, work: Callable[[Callable[[], A]], R]) -> None:
        self._work = work
        self._child = 0
        self._connection: Connection[Any, Any] | None = None

    def __enter__(self) -> Self:
        self._connection, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads, which draw a progress line
            self._child = os.fork()
        if not self._child:
            try:
                self._connection.close()
                Context().run(self._run, theirs)
            finally:
                os._exit(0)
        theirs.close()
        return self

    def _run(self, connection: Connection[Any, Any]) -> None:
        said = time.monotonic()

        def say(text: str) -> None:  # not too often, for nobody may be listening yet
            nonlocal said
            if time.monotonic() - said > _PAUSE_SECONDS:
                said = time.monotonic()
                connection.send((False, text))

        with progress_to(say):
            connection.send((True, self._work(connection.recv)))

    def result(self, asked: A) -> R | None:
        """Return what the work returns, which asked for `asked`; None if it failed, and is to be done here."""
        assert self._connection is not None
        try:
            self._connection.send(asked)
            while True:
                is_done, found = self._connection.recv()
                if is_done:
                    result: R = found
                    return result
                progress(found)
        except (EOFError, OSError):
            return None

    def __exit__(self, *_: object) -> None:
        assert self._connection is not None
        self._connection.close()
        os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
