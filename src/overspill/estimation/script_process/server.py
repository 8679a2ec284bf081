"""The process that runs scripts: it imports torch once, and then makes a copy of itself for each.

A script thus has a process of its own, with a main thread alone, as `python script.py` would give it one, without waiting
for the imports. All that it started is ended with it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from overspill.capture.virtual_gpu.gpu import VirtualGpu

from .kernel import become_subreaper
from .request import ENDED, Mailbox, Request
from .run import TIME_IS_UP, run_script

_TO_WIND_UP = 5.0  # seconds from that signal to the end by force
_GLANCE = 0.02  # seconds between looks at whether it has ended


def serve(connection: int) -> None:
    """Run scripts that come by the socket `connection`, until that is closed."""
    if not os.environ.get("OVERSPILL_DEBUG"):
        warnings.simplefilter("ignore")
    with contextlib.suppress(OSError):  # then a script's orphans are left to themselves
        become_subreaper()
    client = socket.socket(fileno=connection)
    _warm_up()
    while True:
        message, descriptors, _, _ = socket.recv_fds(client, 1, 4)
        if not message:
            return
        request = Mailbox(os.fdopen(os.dup(descriptors[3]), "r+b", buffering=0)).get()
        with _scratch_directory() as scratch:
            child = os.fork()
            if child == 0:
                client.close()
                _become(request, scratch, descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            ended = _wait(child, client, request.time_limit)
            _end_all(child)
        if ended is None:
            return
        client.sendall(ENDED.pack(*ended))


def _warm_up() -> None:
    """Import what torch imports when first used, so that not every script does.

    Nothing goes backward here: where there is a GPU, that would start threads, which a copy of this process lacks.
    """
    with VirtualGpu(), torch.no_grad():
        layer = torch.nn.Linear(1, 1).cuda()
        layer(torch.randn(1, 1).cuda())
        torch.optim.SGD(layer.parameters(), 0.1, momentum=0.9).step()
    gc.freeze()


def _become(request: Request, scratch: Path, descriptors: list[int]) -> None:
    """Be the process of the script, to its end."""
    try:
        os.setpgid(0, 0)
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False, errors="backslashreplace")  # noqa: SIM115
        os.environ.clear()
        os.environ.update(request.environment)
        os.chdir(request.folder)
        run_script(request, scratch, Mailbox(os.fdopen(descriptors[3], "r+b", buffering=0)))
    finally:
        os._exit(1)


def _wait(child: int, client: socket.socket, seconds: float) -> tuple[int, bool] | None:
    """The status of `child`, and whether it took too long; None where nobody waits for it any more."""
    told = time.monotonic() + seconds
    forced = told + _TO_WIND_UP
    too_long = False
    while True:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status, too_long
        if select.select([client], [], [], _GLANCE)[0]:  # it says nothing meanwhile, so this is its end
            return None
        if time.monotonic() > told and not too_long:
            too_long = True
            os.kill(child, TIME_IS_UP)
        if time.monotonic() > forced:
            os.kill(child, signal.SIGKILL)


def _end_all(child: int) -> None:
    """End all processes that the script started: its group, and those that have become ours."""
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
    """A new directory, which goes with all that an overlay left in it."""
    folder = Path(tempfile.mkdtemp(prefix="overspill-script-"))
    try:
        yield folder
    finally:
        for work in folder.glob("layers/work*/work"):  # the kernel makes these such that nobody can list them
            work.chmod(0o700)
        shutil.rmtree(folder, ignore_errors=True)
