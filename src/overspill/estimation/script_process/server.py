"""The process that runs scripts, each in a forked copy.

It imports torch once, and then forks a copy of itself for each script. So a script has a process of its own with a main
thread alone, as under `python script.py`, without waiting for the imports. All processes that it started are ended with
it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch

from overspill.capture.virtual_gpu.gpu import VirtualGpu

from .kernel import become_subreaper
from .places import lines_of, whereabouts, write_lines_when_asked
from .request import Ended, Mailbox, Request, send
from .run import TIME_IS_UP, run_script
from .streams import OpenLines, open_streams

_TO_WIND_UP = 5.0  # seconds from that signal to the end by force
_GLANCE = 0.02  # seconds between looks at whether it has ended
_FIRST_WORD = 20.0  # seconds after which its user is told where it is, and again after three times as many


def serve(connection: int) -> None:
    """Run scripts that arrive by the socket `connection`, until it is closed."""
    if not os.environ.get("OVERSPILL_DEBUG"):
        warnings.simplefilter("ignore")
    with contextlib.suppress(OSError):  # then a script's orphans are left to themselves
        become_subreaper()
    # Serve one request after the other, until the client has gone.
    client = socket.socket(fileno=connection)
    _warm_up()
    while True:
        message, descriptors, _, _ = socket.recv_fds(client, 1, 4)
        if not message:
            return
        request = Mailbox(os.fdopen(os.dup(descriptors[3]), "r+b", buffering=0)).get()
        ended = _run(request, client, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        if ended is None:
            return
        send(client, ended)


def _run(request: Request, client: socket.socket, descriptors: list[int]) -> Ended | None:
    """Return how the script of `request` ended, or None if the client has gone."""
    lines, open_lines = tempfile.TemporaryFile(buffering=0), OpenLines()  # noqa: SIM115

    def tell(text: str) -> None:
        open_lines.end(descriptors[:3])
        send(client, text)

    with _scratch_directory() as scratch, lines:
        # The copy runs the script; this process waits for it.
        child = os.fork()
        if child == 0:
            client.close()
            write_lines_when_asked(lines)
            _become(request, scratch, descriptors, open_lines)
        ended = _wait(child, client, request, lines, tell)
        _end_all(child)
        open_lines.end(descriptors[:3])
        return ended


def _warm_up() -> None:
    """Import the modules that torch imports at first use, so that not every script does.

    No backward runs here. With a GPU it would start threads, which a copy of this process lacks.
    """
    with VirtualGpu(), torch.no_grad():
        layer = torch.nn.Linear(1, 1).cuda()
        layer(torch.randn(1, 1).cuda())
        torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9).step()
    gc.freeze()


def _become(request: Request, scratch: Path, descriptors: list[int], open_lines: OpenLines) -> None:
    """Run as the process of the script, to its end."""
    try:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        open_streams(open_lines)
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        run_script(request, scratch, Mailbox(os.fdopen(descriptors[3], "r+b", buffering=0)))
    finally:
        os._exit(1)


def _wait(
    child: int, client: socket.socket, request: Request, lines: BinaryIO, tell: Callable[[str], None]
) -> Ended | None:
    """Return how `child` ended, with its exit code, or None if the client has gone.

    `child` writes its `lines` at a signal.
    """
    began, next_word, still_at = time.monotonic(), _FIRST_WORD, None

    def where() -> str:
        return whereabouts(lines_of(child, lines), request.script, request.folder)

    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return Ended(os.waitstatus_to_exitcode(status), still_at)
        if select.select([client], [], [], _GLANCE)[0]:  # it says nothing meanwhile, so this is its end
            return None
        seconds = time.monotonic() - began
        # Ask for an end at the limit, and enforce it later.
        if seconds > request.time_limit and still_at is None:
            still_at = where()
            os.kill(child, TIME_IS_UP)
        elif seconds > next_word:
            tell(f"after {next_word:g} seconds the script is still at {where()}")
            next_word *= 3
        if seconds > request.time_limit + _TO_WIND_UP:
            os.kill(child, signal.SIGKILL)


def _end_all(child: int) -> None:
    """End all processes that the script started: its group, and those that have become children of this process."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    while children := _children():
        for process in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _children() -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:  # a system that does not list them
        return []


@contextlib.contextmanager
def _scratch_directory() -> Iterator[Path]:
    """Yield a new directory, which is removed with everything that an overlay left in it."""
    folder = Path(tempfile.mkdtemp(prefix="overspill-script-"))
    try:
        yield folder
    finally:
        for work in folder.glob("layers/work*/work"):  # the kernel makes these such that nobody can list them
            work.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
