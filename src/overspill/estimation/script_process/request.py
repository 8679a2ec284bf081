"""The request to run a script, and the answer."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any, BinaryIO

_LENGTH = struct.Struct("=I")


@dataclass(frozen=True)
class Request:
    """A script to run: see `record_script`."""

    script: str
    arguments: tuple[str, ...]
    iterations: int
    capability: tuple[int, int]
    memory_bytes: int
    time_limit: float
    """Seconds."""
    ways: tuple[str, ...]
    """The methods of `confine`; if empty, the script changes real files."""
    folder: str
    environment: dict[str, str]
    whole_steps: bool


@dataclass(frozen=True)
class Ended:
    """A script process's exit code, and its line at a timeout."""

    code: int
    """The exit code; negative for a signal."""
    still_at: str | None


def send(connection: socket.socket, message: str | Ended) -> None:
    """Send a message about the script, or how it ended."""
    content = pickle.dumps(message)
    connection.sendall(_LENGTH.pack(len(content)) + content)


def receive(connection: socket.socket) -> str | Ended:
    """Return the next message from the peer. Raises ConnectionError if the peer has gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    message: str | Ended = pickle.loads(_exactly(connection, length))  # noqa: S301 - our own process wrote it
    return message


def _exactly(connection: socket.socket, length: int) -> bytes:
    found = connection.recv(length, socket.MSG_WAITALL)
    if len(found) < length:
        raise ConnectionError
    return found


class Mailbox:
    """One object in an open file, which one process leaves there for another."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def put(self, value: Any) -> None:
        """Replace the object. A process killed meanwhile leaves none."""
        content = pickle.dumps(value)
        os.ftruncate(self._file.fileno(), 0)
        os.pwrite(self._file.fileno(), content + b"!", 0)

    def get(self) -> Any:
        """Return the object, or None if the mailbox is empty."""
        content = os.pread(self._file.fileno(), os.fstat(self._file.fileno()).st_size, 0)
        return pickle.loads(content[:-1]) if content.endswith(b"!") else None  # noqa: S301 - our own process wrote it
