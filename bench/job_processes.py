"""Calls of a function, each in a process of its own that is forked, and that may end or hang without harm."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

T = TypeVar("T")
Call = tuple[Any, ...]


def each(
    calls: Sequence[Call], function: Callable[..., T], processes: int, seconds: float, *, loud: bool = False
) -> Iterator[tuple[Call, T | str]]:
    """Each call's arguments and its result, as they come, so many at once; or a line that says why there is none."""
    waiting = deque(calls)
    running: dict[Connection, tuple[Call, BaseProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            call = waiting.popleft()
            connection, process = _started(function, call, loud=loud)
            running[connection] = call, process, time.perf_counter()
        answered = wait(list(running), timeout=1.0)
        for connection, (call, process, begun) in list(running.items()):
            late = time.perf_counter() - begun > seconds
            if connection in answered or late:
                del running[connection]
                yield call, _ended(connection, process, seconds)


def _started(function: Callable[..., T], call: Call, *, loud: bool) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(theirs, function, call, loud), daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _run(connection: Connection, function: Callable[..., T], call: Call, loud: bool) -> None:
    if not loud:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
    connection.send(function(*call))


def _ended(connection: Connection, process: BaseProcess, seconds: float) -> Any:
    answered = connection.poll()
    if not answered:
        process.kill()
    try:
        found = connection.recv() if answered else f"no answer in {seconds:.0f} s"
    except EOFError:
        process.join()
        found = f"the process ended with {process.exitcode}"
    process.join()
    connection.close()
    return found
