"""Work in a forked copy of this process, which shares what was imported, beside the work of this one."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, NoReturn, Self, TypeVar

from .progress import progress, progress_to

_PAUSE_SECONDS = 1.0
A = TypeVar("A")
R = TypeVar("R")
_may_be_copied = _is_copy = False


def let_copy() -> None:
    """Let this process be copied: it is a command's, without threads of a program around it."""
    global _may_be_copied  # noqa: PLW0603 - a property of the process
    _may_be_copied = True


def is_copy() -> bool:
    """Return whether this process is a copy, whose progress another one shows."""
    return _is_copy


def can_fork() -> bool:
    """Return whether this process may be copied, and has another processor for the copy."""
    if not _may_be_copied or _is_copy:
        return False
    return hasattr(os, "fork") and hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) > 1


class Forked(Generic[A, R]):
    """A context in whose copy of this process `work(ask)` runs; what it calls `ask` for comes by `result`.

    The copy has the calling thread alone. It ends with the context at the latest.
    """

    def __init__(self, work: Callable[[Callable[[], A]], Iterator[R]]) -> None:
        self._work = work
        self._child = 0
        self._connection: Connection[Any, Any] | None = None

    def __enter__(self) -> Self:
        self._connection, theirs = Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork with threads, which draw a progress line
            self._child = os.fork()
        if not self._child:
            self._connection.close()
            self._run(theirs)
        theirs.close()
        return self

    def _run(self, connection: Connection[Any, Any]) -> NoReturn:
        global _is_copy  # noqa: PLW0603 - a property of the process
        _is_copy = True
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(1)  # OpenMP's other threads were not copied
        said = time.monotonic()

        def say(text: str) -> None:  # not too often, for nobody may be listening yet
            nonlocal said
            if time.monotonic() - said > _PAUSE_SECONDS:
                said = time.monotonic()
                connection.send((False, text))

        try:
            with progress_to(say):
                for found in self._work(connection.recv):
                    connection.send((True, found))
        finally:
            os._exit(0)

    def result(self, asked: A) -> R | None:
        """Return the next result of the work, which asked for `asked`; None if it failed, and is to be done here."""
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


@contextmanager
def copied(work: Callable[[], Iterator[R]], here: Callable[[], Iterator[R]] | None = None) -> Iterator[Iterator[R]]:
    """Yield an iterator over what `work` makes in a copy of this process, by one result ahead.

    Without a copy, or from where it failed, it is what `here` makes; None: `work`.
    """
    here = here or work
    if not can_fork():
        yield here()
        return

    def in_copy(ask: Callable[[], None]) -> Iterator[R]:
        for found in work():
            ask()
            yield found

    def results() -> Iterator[R]:
        number = 0
        while (found := copy.result(None)) is not None:
            yield found
            number += 1
        yield from islice(here(), number, None)

    with Forked(in_copy) as copy:
        yield results()
