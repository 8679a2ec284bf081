"""Refuse changes to files by Python's audit events.

This is for systems where the kernel does not refuse them. C code that opens files by itself is not seen.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable
from typing import Any

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events -> which of their arguments are paths, and which is the directory that these are relative to.
_METADATA: dict[str, tuple[tuple[int, ...], int | None]] = {
    "os.chmod": ((0,), 2),
    "os.chown": ((0,), 3),
    "os.utime": ((0,), 3),
    "os.setxattr": ((0,), None),
    "os.removexattr": ((0,), None),
}
_NAMES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "os.mkdir": ((0,), 2),
    "os.remove": ((0,), 1),
    "os.rmdir": ((0,), 1),
    "os.rename": ((0, 1), 2),
    "os.link": ((1,), 3),
    "os.symlink": ((1,), 2),
    "os.truncate": ((0,), None),
    "sqlite3.connect": ((0,), None),
}
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"})


def refuse_changes(but_below: Iterable[str], *, metadata_alone: bool = False) -> None:
    """Refuse this process's changes to files outside the directories `but_below`.

    From here on Python code gets PermissionError outside them. It also cannot start programs, which could change files.
    With `metadata_alone` only changes of modes, owners, times and attributes are refused, which Landlock does not see.
    The refusal cannot be undone.
    """
    allowed = tuple(os.path.realpath(folder) + os.sep for folder in but_below)
    events = _METADATA if metadata_alone else _METADATA | _NAMES

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not metadata_alone and isinstance(flags, int) and flags & _CHANGES:
                _check(path, -1, allowed)
        elif event in events:
            paths, relative_to = events[event]
            folder = -1 if relative_to is None else arguments[relative_to]
            for index in paths:
                _check(arguments[index], folder, allowed)
        elif event in _PROGRAMS and not metadata_alone:
            raise PermissionError(errno.EACCES, "an estimate cannot watch other programs here", str(arguments[0]))

    # There is no way to remove it.
    sys.addaudithook(watch)


def _check(path: Any, folder: Any, allowed: tuple[str, ...]) -> None:
    """Raise PermissionError if `path` is not allowed.

    It is relative to the open directory `folder` (-1: the current one).
    """
    if isinstance(path, int) or path is None:  # a file that is open already, or a pipe
        return
    name = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0:
        name = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)  # noqa: PTH115, PTH118
    # The last part may be a link itself, which is what changes where it is removed; its target is what is opened.
    if not (os.path.realpath(name) + os.sep).startswith(allowed):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
