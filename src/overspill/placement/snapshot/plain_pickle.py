"""Unpickle untrusted data safely: tried first in a limited process.

A few bytes can make the unpickler take all memory, for a table that they claim to need; run for ever, with tuples that
repeat themselves as a key; or overflow the C stack, with tuples within tuples as a key. None of that is an exception.

Run by its file name, this module is that process: it reads a pickle from standard input within limits, and imports
nothing of ours.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

MOST_SHOWN = 100
MEMORY_BYTES, MEMORY_PER_BYTE = 256 << 20, 32
"""Memory limit: a fixed part, and bytes per byte of the pickle. A snapshot takes some 10 a byte."""
CPU_SECONDS, BYTES_PER_SECOND = 3, 2 << 20
"""CPU time limit: a fixed part, and a second for so many bytes. A snapshot takes a twentieth of that."""
STACK_BYTES = 1 << 20
"""Stack limit, less than that of our threads; a snapshot nests lists five deep."""
_NO_MEMORY = 3


class ForbiddenError(pickle.UnpicklingError):
    """The pickle contains something other than plain data."""


class BombError(pickle.UnpicklingError):
    """The pickle is small and takes far too much to read."""


class PlainUnpickler(pickle.Unpickler):
    """An unpickler without classes and functions: only builtin data."""

    def find_class(self, module: str, name: str) -> NoReturn:
        """Refuse `module.name`."""
        shown = f"{module}.{name}"[:MOST_SHOWN]
        raise ForbiddenError("".join(c if c.isprintable() else "?" for c in shown))


def load_plain(content: bytes) -> Any:
    """The plain data that the pickle `content` holds.

    Raises ForbiddenError where it contains more than that, BombError where it is made to do harm, and whatever the
    unpickler raises for what is no pickle.
    """
    _try_out(content)
    return _load(content)


def _load(content: bytes) -> Any:
    with _no_collection():
        return PlainUnpickler(io.BytesIO(content)).load()


@contextmanager
def _no_collection() -> Iterator[None]:
    """Context without garbage collection, which halves the time for millions of objects."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def _try_out(content: bytes) -> None:
    """Raise BombError unless a limited process survives reading `content`, whatever else it finds there."""
    command = [sys.executable, "-I", "-S", __file__]
    done = subprocess.run(command, input=content, capture_output=True, check=False)  # noqa: S603 - ourselves
    if done.returncode == 0:
        return
    # How the process ended says what the pickle does.
    what = {
        _NO_MEMORY: "take very much memory",
        -signal.SIGKILL: "take very much time or memory",
        -signal.SIGXCPU: "take very long",
        -signal.SIGSEGV: "overflow the stack",
    }
    if done.returncode not in what:
        said = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit code {done.returncode}"]
        raise pickle.UnpicklingError(f"the process that reads it failed: {said[-1]}")
    raise BombError(f"{len(content)} bytes that {what[done.returncode]} to read")


def _limit(nbytes: int) -> None:
    """Limit this process to what a pickle of `nbytes` bytes may need."""
    seconds = CPU_SECONDS + nbytes // BYTES_PER_SECOND
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES + MEMORY_PER_BYTE * nbytes,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_STACK: STACK_BYTES,
        resource.RLIMIT_CORE: 0,
    }
    for what, limit in limits.items():
        _, most = resource.getrlimit(what)
        resource.setrlimit(what, (limit if most == resource.RLIM_INFINITY else min(limit, most), most))


def _main() -> NoReturn:
    content = sys.stdin.buffer.read()
    _limit(len(content))
    code = 0
    try:
        _load(content)
    except MemoryError:
        code = _NO_MEMORY
    except Exception:  # noqa: BLE001, S110 - ours to find again, in the process that can say what it means
        pass
    os._exit(code)  # without taking apart what was read


if __name__ == "__main__":
    _main()
