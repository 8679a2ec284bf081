"""Run scripts in a process that has only imported torch (see `server.py`)."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from overspill.core.errors import OverspillError

from .request import Ended, Mailbox, Request, receive

_START = (
    "import sys; sys.path[:] = [p for p in sys.path if p] + [sys.argv[2]]; "
    "from overspill.estimation.script_process.server import serve; serve(int(sys.argv[1]))"
)


class _Server:
    """The process that runs scripts, one after the other."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-c", _START, str(theirs.fileno()), str(Path(__file__).parents[3])]
        self._process = subprocess.Popen(  # noqa: S603 - a session of its own: Ctrl-C is for us, who end it
            command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        theirs.close()
        self.owner = os.getpid()

    def run(self, descriptors: list[int], tell: Callable[[str], None]) -> Ended:
        """Return how the script in a mailbox ended.

        The mailbox is the last descriptor; the others are the script's standard ones.
        """
        try:
            socket.send_fds(self._socket, [b"!"], descriptors)
            while not isinstance(message := receive(self._socket), Ended):
                tell(message)
        except ConnectionError:
            raise OverspillError("the process that runs scripts has ended unexpectedly") from None
        return message

    def close(self) -> None:
        """End the process, and a script that it runs."""
        self._socket.close()
        self._process.wait()


_server: _Server | None = None
_one_at_a_time = threading.RLock()


def start() -> None:
    """Start the process that runs scripts, unless it is running.

    It needs a few seconds, in which the caller can work.
    """
    global _server  # noqa: PLW0603 - one serves all
    with _one_at_a_time:
        if _server is None or _server.owner != os.getpid():
            _server = _Server()


def stop() -> None:
    """End that process, and the scripts that it runs."""
    global _server  # noqa: PLW0603
    if _server is not None and _server.owner == os.getpid():
        _server.close()
    _server = None


atexit.register(stop)


def run(request: Request, *, output_to_stderr: bool, tell: Callable[[str], None]) -> tuple[Ended, Any]:
    """Run a script, and return how it ended and its answer.

    An interruption of this call ends the script too.
    """
    with _one_at_a_time, tempfile.TemporaryFile(buffering=0) as file, contextlib.ExitStack() as stack:
        mailbox = Mailbox(file)
        mailbox.put(request)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        # The script has our standard streams.
        standard = [stack.enter_context(_open(number)) for number in ((0, 2, 2) if output_to_stderr else (0, 1, 2))]
        start()
        assert _server is not None
        try:
            ended = _server.run([*standard, file.fileno()], tell)
        except BaseException:
            stop()
            raise
        left = mailbox.get()
        return ended, None if isinstance(left, Request) else left


@contextlib.contextmanager
def _open(number: int) -> Iterator[int]:
    """Yield a standard descriptor, or one of the null device if it is closed."""
    try:
        copy = os.dup(number)
    except OSError:
        copy = os.open(os.devnull, os.O_RDWR)
    try:
        yield copy
    finally:
        os.close(copy)
