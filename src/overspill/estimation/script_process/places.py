"""Find the line of a script that failed, needs a value, or does not end, and why."""

from __future__ import annotations

import faulthandler
import linecache
import os
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from overspill.capture.frames import is_of_the_script

WHERE = signal.SIGURG
"""The signal at which a script's process writes down its current line; a process without a handler ignores it."""
_TO_WRITE = 0.5  # seconds that this takes at most
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)
# Modules of Python's library in which a script waits -> for what.
_WAITS = {
    "socket.py": "the network",
    "ssl.py": "the network",
    "subprocess.py": "a program that it started",
    "popen_fork.py": "a process that it started",
    "threading.py": "a thread that it started",
}
Line = tuple[str, int]


def spelled(file: str, line: int | None, folder: str | None = None) -> str:
    """Return `file:line`, relative to `folder`, the current directory, if the file is below it."""
    path, near = Path(file), Path(folder or Path.cwd())
    return f"{path.relative_to(near) if path.is_relative_to(near) else file}:{line}"


def place_of(error: BaseException) -> str:
    """Return the innermost line of the script that `error` passed, or an empty text."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((spelled(frame.filename, frame.lineno) for frame in frames if is_of_the_script(frame.filename)), "")


def place_in(frame: FrameType | None) -> str:
    """Return the innermost line of the script in the stack of `frame` and its callers, or an empty text."""
    return next((spelled(*line) for line in lines_from(frame) if is_of_the_script(line[0])), "")


def lines_from(frame: FrameType | None) -> Iterator[Line]:
    """Yield the lines that run, from `frame` outwards."""
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def whereabouts(lines: Sequence[Line], name: str, folder: str | None = None) -> str:
    """Return the innermost script line, with its text and the call it waits for in brackets; otherwise `name`."""
    found = next((index for index, (file, _) in enumerate(lines) if is_of_the_script(file)), None)
    if found is None:
        return name
    file, number = lines[found]
    linecache.checkcache(file)
    text = linecache.getline(file, number).strip()
    within = (Path(library).name for library, _ in lines[:found])
    waits = next((f", which waits for {_WAITS[module]}" for module in within if module in _WAITS), "")
    return spelled(file, number, folder) + (f" (`{text}`{waits})" if text else "")


# --- Of another process -----------------------------------------------------------------------------------------------


def write_lines_when_asked(file: BinaryIO) -> None:
    """Write the main thread's lines to `file` at each signal `WHERE`, from here on."""
    faulthandler.register(WHERE, file, all_threads=False)


def lines_of(process: int, file: BinaryIO) -> list[Line]:
    """Return the lines that `process` runs, innermost first.

    The process writes them to `file`, even while C code keeps Python waiting.
    """
    os.ftruncate(file.fileno(), 0)
    os.lseek(file.fileno(), 0, os.SEEK_SET)  # for both processes
    os.kill(process, WHERE)
    text, until = b"", time.monotonic() + _TO_WRITE
    while time.monotonic() < until:
        time.sleep(_TO_WRITE / 10)
        before, text = text, os.pread(file.fileno(), 1 << 16, 0)
        if text and text == before:
            break
    return [(file, int(line)) for file, line in _FRAME.findall(text.decode(errors="replace"))]
