"""Landlock: give up the right to change most files.

A Linux process keeps that right for a few directories. The limit covers C code and children too.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from .kernel import call, gain_no_privileges

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # numbers of the system calls, the same on all machines
_BELOW_PATH = 1
_ASK_VERSION = 1
_WRITE = 1 << 1
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))
_MOVE, _TRUNCATE = 1 << 13, 1 << 14  # since versions 2 and 3


def forbid_writes(but_below: Iterable[str]) -> None:
    """Forbid changes to files outside the directories `but_below`.

    The limit holds for this process, and those that it starts from here on. The process must have one thread. Raises
    OSError if the kernel has no Landlock.
    """
    version = call("syscall", _CREATE, None, 0, _ASK_VERSION)
    rights = _WRITE | _REMOVE_AND_MAKE | (_MOVE if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    handled = ctypes.create_string_buffer(struct.pack("Q", rights), 8)
    rules = call("syscall", _CREATE, handled, ctypes.c_size_t(8), 0)
    for folder in but_below:
        place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place), 12)
        call("syscall", _ADD_RULE, rules, _BELOW_PATH, rule, 0)
        os.close(place)
    gain_no_privileges()
    call("syscall", _RESTRICT, rules, 0)
    os.close(rules)
