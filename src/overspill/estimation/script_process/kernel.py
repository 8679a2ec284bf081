"""Linux system calls without a function in Python.

Each raises OSError, also if the kernel lacks the call.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

_SUBREAPER, _NO_NEW_PRIVILEGES = 36, 38  # of prctl
_CAPABILITIES_VERSION = 0x20080522


def call(name: str, *arguments: Any) -> int:
    """Call the function `name` of the C library.

    Bytes, integers and ctypes values are passed unchanged.
    """
    if not sys.platform.startswith("linux"):
        raise OSError(f"{name} is a call of Linux")
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = getattr(ctypes.CDLL(None, use_errno=True), name)(*words)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return int(result)


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    """Mount a file system at `target`; `flags` are those of the system call."""
    call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())


def become_subreaper() -> None:
    """Make orphaned descendants of this process its children."""
    call("prctl", _SUBREAPER, 1, 0, 0, 0)


def gain_no_privileges() -> None:
    """Give no started program more rights than this process, from here on.

    Landlock requires it.
    """
    call("prctl", _NO_NEW_PRIVILEGES, 1, 0, 0, 0)


def drop_capabilities() -> None:
    """Give up all rights of an administrator that this process has."""
    call("capset", (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0), (ctypes.c_uint32 * 6)())
