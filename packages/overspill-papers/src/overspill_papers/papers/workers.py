"""The longest tasks, each run once: in this process, or in processes next to the one that computes the rows."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any, Self, TypeVar

T = TypeVar("T")
AT_MOST = 4
"""Processes, of half a GB each."""


class StillMadeError(Exception):
    """A requested result is not available yet; request it again after `Workers.wait`."""


class Workers:
    """Run functions of a module, each once.

    `say` is called with each task that begins. Outside of a `with` block tasks run in this process at once. Inside of
    it they run in a process for each core, which begins with `begin`. A request for an unavailable result then raises
    StillMadeError.
    """

    def __init__(self, say: Callable[[str], None] = lambda _: None, begin: Callable[[], object] = gc.disable) -> None:
        self._say = say
        self._begin = begin
        self._pool: ProcessPoolExecutor | None = None
        self._futures: dict[tuple[Any, ...], Future[Any]] = {}

    def __enter__(self) -> Self:
        cores = len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(min(cores, AT_MOST), get_context("spawn"), _begun, (self._begin,))
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def made(self, what: str, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `function` for `arguments`; `what` describes it in words."""
        key = function, *arguments
        if key not in self._futures:
            self._say(what)
            if self._pool is None:
                self._futures[key] = Future()
                self._futures[key].set_result(function(*arguments))
            else:
                self._futures[key] = self._pool.submit(_made, function, *arguments)
        made: Future[T] = self._futures[key]
        if not made.done():
            raise StillMadeError(what)
        return made.result()

    def awaited(self, function: Callable[..., T], *arguments: Any) -> T:
        """Return the result of `function` in this process.

        It is tried again until all results that it requests are available.
        """
        while True:
            try:
                return function(*arguments)
            except StillMadeError:
                self.wait()

    def wait(self) -> None:
        """Wait until one of the running tasks is done."""
        wait([future for future in self._futures.values() if not future.done()], return_when=FIRST_COMPLETED)


def _begun(begin: Callable[[], object]) -> None:
    begin()
    # Tracing makes millions of objects: the collector would take a fifth of its time.
    gc.disable()


def _made(function: Callable[..., T], *arguments: Any) -> T:
    made = function(*arguments)
    gc.collect()
    return made
