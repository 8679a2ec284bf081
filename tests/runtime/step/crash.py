"""A process that is stopped at any one of its system calls: killed there, or told that the call has failed.

By user notification of seccomp (Linux 5.9 and later): the child installs a filter for all of its threads, after which the
kernel asks the parent before each system call of any of them. No debugger, no rights and no helper program are needed,
and a call that is refused is never begun. What the parent does is said in a few numbers in shared memory (`Rule`), which
the child sets without a system call. A child that makes no call for `HUNG_SECONDS` hangs, and is killed.
"""

from __future__ import annotations

import array
import ctypes
import errno
import faulthandler
import fcntl
import mmap
import os
import platform
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from typing import NamedTuple

KILL = -1
"""In place of the number of an error: the process is killed when it makes the call."""
HUNG_SECONDS = 30.0
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": {
        "sendmsg": 46, "seccomp": 317, "exit_group": 231, "pread": 327, "pwrite": 18, "mmap": 9, "fallocate": 285,
        "ftruncate": 77, "openat": 257, "brk": 12, "fstatfs": 138, "futex": 202, "close": 3, "write": 1, "rename": 82,
        "fchmod": 91, "munmap": 11, "madvise": 28, "clone3": 435, "linkat": 265, "mprotect": 10, "unlink": 87,
        "getpid": 39, "gettid": 186,
    },
    "aarch64": {
        "sendmsg": 211, "seccomp": 277, "exit_group": 94, "pread": 286, "pwrite": 68, "mmap": 222, "fallocate": 47,
        "ftruncate": 46, "openat": 56, "brk": 214, "fstatfs": 44, "futex": 98, "close": 57, "write": 64, "rename": 38,
        "fchmod": 52, "munmap": 215, "madvise": 233, "clone3": 435, "linkat": 37, "mprotect": 226, "unlink": 35,
        "getpid": 172, "gettid": 178,
    },
}  # fmt: skip
"""System calls by name; `pread` is the one behind `os.preadv`."""
CALLS = NUMBERS.get(platform.machine(), {})
_NO_TRACE = frozenset(CALLS.get(name) for name in ("futex", "getpid", "gettid"))
"""They change nothing that outlives a process: who is killed there leaves what it leaves at its next call."""
_NO_NEW_PRIVILEGES = 38  # of prctl
_MODE_FILTER, _ALL_THREADS, _NEW_LISTENER, _TELL_WHO_CANNOT = 1, 1, 8, 16
_ALLOW, _NOTIFY = 0x7FFF0000, 0x7FC00000
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctl's, of 80 and 24 bytes
_GO_ON = 1
_MEMORY = frozenset(CALLS.get(name) for name in ("brk", "mmap", "mprotect"))
_OF_PYTHON = (1 << 14, 1 << 18, 1 << 20)
"""Bytes that the interpreter maps for itself. CPython does not survive that everywhere, with or without us."""
_FIELDS = ("watches", "count", "number", "at", "times", "error", "met")


class Rule:
    """What happens to which system calls; in memory that parent and child share.

    While `watches` is set, calls are counted in `count`: those of `number`, or where that is -1 all but `futex`, `getpid` and `gettid`. Those from the one
    numbered `at` on, `times` of them, fail with `error`, or are where the process is `KILL`ed. `met` counts those.
    """

    def __init__(self) -> None:
        self._shared = memoryview(mmap.mmap(-1, 8 * len(_FIELDS))).cast("q")
        self._refused = 0  # the thread that has just been refused memory
        self.set()

    def __getattr__(self, name: str) -> int:
        return self._shared[_FIELDS.index(name)]

    def set(self, *, number: int = -1, at: int = 0, times: int = 1, error: int = 0, watches: bool = False) -> None:
        """From now on this is the rule; nothing has been counted yet."""
        for place, value in enumerate((watches, 0, number, at, times, error, 0)):
            if place:
                self._shared[place] = int(value)
        self._shared[0] = int(watches)

    def rest(self) -> int:
        """Watch no more; how many calls were counted."""
        self._shared[0] = 0
        return self.count

    def verdict(self, thread: int, number: int, second: int) -> int:
        """What is to happen to a call of this `number`, whose `second` argument is known: 0, an error's number, or KILL."""
        is_refused, self._refused = self._refused == thread, 0
        error = self._by_number(number, second)
        if is_refused and number in _MEMORY:
            error = self.error  # the same wish for memory: malloc tries one way after another
        if error and number in _MEMORY:
            self._refused = thread
        return error

    def _by_number(self, number: int, second: int) -> int:
        if not self.watches or (number != self.number and (self.number != -1 or number in _NO_TRACE)):
            return 0
        if number == CALLS["mmap"] and self.error != KILL and second in _OF_PYTHON:
            return 0
        self._shared[1] += 1
        if not self.at <= self.count < self.at + self.times or not self.at:
            return 0
        self._shared[6] += 1
        return self.error


class Ended(NamedTuple):
    """How a child has ended: its exit code, or a signal's as a negative number; what it wrote to standard error; whether it hung."""

    code: int
    said: str
    hung: bool


def can_watch() -> bool:
    """Whether this machine's kernel lets a parent be asked for each system call."""
    if not sys.platform.startswith("linux") or not CALLS:
        return False
    return run_watched(lambda: None, Rule()).code == 0


def run_watched(job: Callable[[], None], rule: Rule) -> Ended:
    """Carry `job` out in a forked child, each of whose system calls goes by `rule`."""
    rule.set()
    ours, theirs = socket.socketpair()
    said, saying = os.pipe()
    if not (child := os.fork()):
        os.dup2(saying, 2)
        for file in (said, saying):
            os.close(file)
        ours.close()
        _be_child(job, theirs)
    theirs.close()
    os.close(saying)
    message, files, *_ = ours.recvmsg(1, socket.CMSG_SPACE(4))
    ours.close()
    hung = False
    if message:
        listener = array.array("i", files[0][2])[0]
        hung = not _answer_all(listener, child, rule)
        os.close(listener)
    _, status = os.waitpid(child, 0)
    with os.fdopen(said, "rb") as text:
        return Ended(os.waitstatus_to_exitcode(status), text.read().decode(errors="replace"), hung)


def _be_child(job: Callable[[], None], parent: socket.socket) -> None:
    code = 1
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115 - pytest has put another in its place
    try:
        faulthandler.enable(2)
        parent.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [_ask_parent()]))])
        job()
        code = 0
    except BaseException:  # noqa: BLE001 - whatever it is, the parent is told
        traceback.print_exc()
    finally:
        os._exit(code)


def _ask_parent() -> int:
    """From here on every system call but `sendmsg` is asked for at the descriptor that this gives. Raises OSError."""
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 1, 0, CALLS["sendmsg"]),  # of this one
        (0x06, 0, 0, _NOTIFY),
        (0x06, 0, 0, _ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *i) for i in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl(_NO_NEW_PRIVILEGES, ctypes.c_ulong(1), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))
    flags = ctypes.c_ulong(_ALL_THREADS | _NEW_LISTENER | _TELL_WHO_CANNOT)
    listener = library.syscall(ctypes.c_long(CALLS["seccomp"]), ctypes.c_ulong(_MODE_FILTER), flags, program)
    if listener < 0:
        raise OSError(ctypes.get_errno(), "seccomp")
    return int(listener)


def _answer_all(listener: int, child: int, rule: Rule) -> bool:
    """Answer for each call of the child until it has ended; whether it did by itself or by the rule."""
    poll = select.poll()
    poll.register(listener, select.POLLIN)
    while True:
        events = poll.poll(HUNG_SECONDS * 1000)
        if not events:
            os.kill(child, signal.SIGKILL)
            return False
        if not events[0][1] & select.POLLIN:
            return True
        asked = bytearray(80)
        try:
            fcntl.ioctl(listener, _RECEIVE, asked)
            call, thread, _, number, _, _, _, second = struct.unpack_from("=QIIiIQQQ", asked)
            verdict = rule.verdict(thread, number, second)
            if verdict == KILL:
                os.kill(child, signal.SIGKILL)
                continue
            error = 0 if number == CALLS["brk"] else -verdict  # which fails by an address that is too low
            answer = struct.pack("=QqiI", call, 0, error, 0 if verdict else _GO_ON)
            fcntl.ioctl(listener, _SEND, bytearray(answer))
        except OSError as error:
            if error.errno != errno.ENOENT:  # the one that asked has been killed meanwhile
                raise
