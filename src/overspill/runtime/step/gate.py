"""Lock on the tensors of a step: one thread, not re-entrant, signals deferred.

A step takes the bytes of parameters out of their objects, and a read brings them back. In between they are neither the
old nor the new ones. So both go through the `Gate` of the step. Other threads wait there. Code within a step in its own
thread cannot wait: a finalizer gets an error, and signal handlers run when the step is over.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from types import FrameType
from typing import Any, TypeVar

import torch

from overspill.core.errors import RequestError
from overspill.runtime.transfer.forks import tell_of_forks
from overspill.runtime.transfer.lanes import is_lane

T = TypeVar("T")

WITHIN = (
    "a step is under way in this very thread, and parameters and state are neither the old nor the new ones: "
    "this was called from within it, by a finalizer, a garbage collection callback, the model or the optimizer; read "
    "when the step has returned"
)
ON_LANE = (
    "a garbage collection calls this in the thread that copies to or from the store, which cannot wait for its own "
    "copies; set a flag there, and read between two steps"
)
FORKED_WITHIN = (
    "this process was forked while a step was under way, and has neither the old nor the new parameters and state; "
    "fork between two steps, within step.paused() where another thread steps"
)
FORKED = (
    "a train step does not go on in a forked child; make model, optimizer and step in it, or start it by spawn. "
    "What was on the device or in host memory can be read"
)
FINISHED = "overspill: the step was finished first; what it returned is this error's step_result"
READERS_SECONDS = 60.0
"""Longest wait of a step for other threads' loops over parameters."""
WAIT_SECONDS = 0.0005
"""Interval at which waiting threads look again."""
LONGEST_WAIT_SECONDS = 1.0
"""Longest time that a new reader lets a waiting step go first."""
GRACE_SECONDS = 0.02
"""Seconds that a tensor stays on the device after another thread has read it."""


class Gate:
    """Lets one thread at a time access the tensors of a step.

    `stepper` is the thread of the last step. A read by any other thread delays the next step while it lasts.
    """

    def __init__(self) -> None:
        self.stepper = get_ident()
        self.is_busy = False
        """Whether the step's tensors are neither the old nor the new values."""
        self.is_tracing = False
        """Whether the model is being traced on fake parameters, which the tracing thread may read."""
        self.is_forked = False
        """Whether this process is a child of the one that made the step."""
        self.may_go_on: Callable[[], None] = _nothing
        """Called between two instructions; raises KeyboardInterrupt at the second Ctrl-C."""
        self._forked_within = False
        # The lock and its owner, readers, and work for the end of the step.
        self._lock = RLock()
        self._owner = 0
        self._wanted = False
        self._readers: dict[int, tuple[int, bool]] = {}  # by reading: its thread, and whether it may take long
        self._waiting: dict[int, bool] = {}  # threads that wait to read
        self._grace: dict[int, float] = {}  # by thread: until when what it read stays
        self._later: list[Callable[[], None]] = []
        tell_of_forks(self)

    def forked(self) -> None:
        """Reset the gate in a forked child, where this is the only thread."""
        self._lock = RLock()
        self._forked_within = self._forked_within or self.is_busy
        self.is_tracing = self._wanted = False
        self.is_forked = True
        self.stepper = get_ident()
        self._owner = 0
        self._readers.clear()
        self._waiting.clear()
        self._grace.clear()

    def alone(self, work: Callable[[], T], *, steps: bool = False) -> T:
        """Run `work()` without other threads or signal handlers, and return its result.

        With `steps`, it first waits for other threads that are reading. Raises RequestError from within a step, and in
        a child that was forked within one. Also raises the errors of `work` and of handlers for signals that came
        meanwhile. If a handler raises after the step, its error has the step's result as `step_result`.
        """
        if self._owner == get_ident():
            if self.is_busy:
                raise RequestError(WITHIN)
            return self._busy(work)
        if is_lane():
            raise RequestError(ON_LANE)
        if self._forked_within:
            raise RequestError(FORKED_WITHIN)
        done: list[T] = []

        def kept() -> T:
            done.append(work())
            return done[0]

        try:
            return self._when_free(kept, steps=steps)
        except BaseException as error:
            if steps and done and done[0] is not None:
                error.__dict__["step_result"] = done[0]
                error.add_note(FINISHED)
            raise
        finally:
            if steps:
                self._wanted = False

    def _when_free(self, work: Callable[[], T], *, steps: bool) -> T:
        since = time.monotonic()
        while steps and self._waiting and time.monotonic() < since + LONGEST_WAIT_SECONDS:
            time.sleep(WAIT_SECONDS)  # else a thread that steps and steps again would let no reader in
        while True:
            # Held before the lock is taken, so that no exception comes between; let go where it has to be waited for.
            with held_signals() as may_go_on:
                lock = self._lock
                if is_mine := lock.acquire(blocking=False):
                    try:
                        if not (steps and self._others_read()):
                            self.may_go_on = may_go_on
                            return self._own(work, steps=steps)
                    finally:
                        lock.release()
            # Readers are in the way: wait for them. Else another thread has the lock.
            if is_mine:
                self._wanted = True
                self._check_patience(time.monotonic() - since)
                time.sleep(WAIT_SECONDS)
            else:
                self._wait_for_turn(steps)

    def _wait_for_turn(self, steps: bool) -> None:
        if steps:
            time.sleep(WAIT_SECONDS)
            return
        self._waiting[get_ident()] = True
        try:
            with self._lock:
                pass
        finally:
            del self._waiting[get_ident()]

    def _own(self, work: Callable[[], T], *, steps: bool) -> T:
        self._owner = get_ident()
        if steps:
            self.stepper = self._owner
        try:
            return self._busy(work)
        finally:
            self._owner = 0

    def _busy(self, work: Callable[[], T]) -> T:
        self.is_busy = True
        try:
            return work()
        finally:
            try:
                while self._later:
                    self._later.pop(0)()
            finally:
                self.is_busy = False

    def check_process(self) -> None:
        """Raise RequestError in a forked child, which cannot step."""
        if self.is_forked:
            raise RequestError(FORKED)

    def alone_or_later(self, work: Callable[[], None]) -> None:
        """Run `work()` alone, after the work that is under way in this thread."""
        if self.is_busy and self._owner == get_ident():
            self._later.append(work)
        elif is_lane():  # which may not wait for itself
            threading.Thread(target=self.alone, args=(work,), name="overspill-dropped").start()
        else:
            self.alone(work)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Allow this thread to read within a step, while the context lasts."""
        self.is_busy = False
        try:
            yield
        finally:
            self.is_busy = True

    # -- readers

    def is_open(self) -> bool:
        """Return whether this thread may read without waiting."""
        me = get_ident()
        return (not self.is_busy and me == self.stepper) or (self.is_tracing and me == self._owner)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def read(self, bring: Callable[[], None], *, loops: bool = False) -> Reading | None:
        """Run `bring()` before a read.

        A thread that `loops` and is not the thread of the steps gets a Reading. It keeps the tensors on the device.
        """
        if self.is_tracing and self._owner == get_ident():
            return None
        if self._wanted and not any(thread == get_ident() for thread, _ in list(self._readers.values())):
            self._let_go_first()
        return self.alone(lambda: self._brought(bring, loops))

    def _brought(self, bring: Callable[[], None], loops: bool) -> Reading | None:
        bring()
        if (me := get_ident()) == self.stepper:
            return None
        if loops:
            return Reading(self._readers)
        self._grace[me] = time.monotonic() + GRACE_SECONDS
        return None

    def _let_go_first(self) -> None:
        """Wait for a step that was waiting before this reader."""
        end = time.monotonic() + LONGEST_WAIT_SECONDS
        while self._wanted and time.monotonic() < end:
            time.sleep(WAIT_SECONDS)

    def reading(self, *, for_long: bool = False) -> Reading:
        """Return a Reading: while it lives, other threads do not step.

        With `for_long` they wait for it without limit.
        """
        return self.alone(lambda: Reading(self._readers, for_long=for_long))

    def _others_read(self) -> bool:
        """Return whether other threads are reading tensors that a step would take away."""
        if not (self._readers or self._grace):
            return False
        me, now = get_ident(), time.monotonic()
        if any(thread != me for thread, _ in list(self._readers.values())):
            return True
        if any(thread != me and until > now for thread, until in list(self._grace.items())):
            return True
        self._grace.clear()
        return False

    def _check_patience(self, waited: float) -> None:
        """Raise RequestError for a reading that seems forgotten."""
        if waited > READERS_SECONDS and not any(for_long for _, for_long in list(self._readers.values())):
            raise RequestError(
                f"another thread has been in a loop over parameters or optimizer state for {waited:.0f} s, and a step "
                "would take them away; let that thread end its loop, or take its time within step.paused()"
            )


class Reading:
    """A token for reads: while it lives, other threads do not step."""

    __slots__ = ("_readers",)

    def __init__(self, readers: dict[int, tuple[int, bool]], *, for_long: bool = False) -> None:
        self._readers = readers
        readers[id(self)] = get_ident(), for_long

    def __del__(self) -> None:
        self._readers.pop(id(self), None)


class During(Collection[Any]):
    """A dictionary view that keeps its Reading alive while it is used."""

    def __init__(self, view: Collection[Any], reading: Reading) -> None:
        self._view = view
        self._reading = reading

    def __iter__(self) -> Iterator[Any]:
        yield from self._view  # the generator has this object, and so the reading

    def __len__(self) -> int:
        return len(self._view)

    def __contains__(self, item: object) -> bool:
        return item in self._view


def _nothing() -> None:
    pass


# -- signals

_NOT_HELD = frozenset({signal.SIGSEGV, signal.SIGFPE, signal.SIGILL, signal.SIGBUS, signal.SIGABRT})
"""Signals that the process itself causes."""
_HELD = tuple(int(number) for number in signal.valid_signals() - _NOT_HELD)


@contextmanager
def held_signals() -> Iterator[Callable[[], None]]:
    """Defer Python signal handlers to the end of the context.

    Each handler runs once. At a second Ctrl-C, the next call of the yielded function calls its handler. Outside the
    main thread, where no handler runs, nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield _nothing
        return
    # While deferred, signals are only counted.
    came: dict[int, int] = {}

    def note(number: int, _: FrameType | None) -> None:
        came[number] = came.get(number, 0) + 1

    def second_ctrl_c() -> None:
        if came.get(signal.SIGINT, 0) > 1:
            del came[signal.SIGINT]
            handlers[signal.SIGINT](signal.SIGINT, sys._getframe())

    # Replace all handlers by one that notes the signal, then restore and run them.
    handlers: dict[int, Any] = {n: h for n in _HELD if callable(h := signal.getsignal(n))}
    try:
        for number in handlers:
            signal.signal(number, note)
        yield second_ctrl_c
    finally:
        try:
            _restore(handlers, note)
        finally:
            _deliver(came, handlers)


def _restore(handlers: dict[int, Any], note: Callable[..., None]) -> None:
    """Restore the handlers; if one raises at once, raise that when all are restored."""
    error: BaseException | None = None
    while True:
        try:
            ours = [n for n in handlers if signal.getsignal(n) is note]
            deque(map(signal.signal, ours, map(handlers.__getitem__, ours)), maxlen=0)
            break
        except BaseException as raised:  # noqa: BLE001 - kept, and raised below
            error = raised
    if error is not None:
        raise error


def _deliver(came: dict[int, int], handlers: dict[int, Any]) -> None:
    """Call the handlers of all signals that came, even if one raises."""
    if came:
        number = next(iter(came))
        del came[number]
        try:
            handlers[number](number, sys._getframe())
        finally:
            _deliver(came, handlers)
