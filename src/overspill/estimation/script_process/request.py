"""What is asked of the process that runs a script, and what it answers."""

from __future__ import annotations

import os
import pickle
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

ENDED = struct.Struct("=i?")
"""How a script's process has ended, in bytes: the status as of waitpid, and whether the time was over."""


@dataclass(frozen=True)
class Request:
    """A script to be run: see `record_script`. `ways` are those of `confine`; none: the script changes real files.

    `time_limit` is in seconds.
    """

    script: str
    arguments: tuple[str, ...]
    iterations: int
    capability: tuple[int, int]
    memory_bytes: int
    time_limit: float
    ways: tuple[str, ...]
    folder: str
    environment: dict[str, str]


class Mailbox:
    """One object in an open file, which one process leaves there for another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def put(self, value: Any) -> None:
        """Replace the object. Whoever is killed meanwhile has left none."""
        content = pickle.dumps(value)
        os.ftruncate(self._file.fileno(), 0)
        os.pwrite(self._file.fileno(), content + b"!", 0)

    def get(self) -> Any:
        """The object; None where there is none."""
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        return pickle.loads(content[:-1]) if content.endswith(b"!") else None  # noqa: S301 - our own process wrote it
