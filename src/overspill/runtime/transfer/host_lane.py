"""The lane of the host: updates of what the store has, one after another, in a thread beside compute.

An update that fails stops those behind it. Its error reaches the thread of the steps at its next transfer or update,
with a note that says which parameters are updated in part or not at all. If the store failed before the update began,
nothing is lost: all of them begin again.

Known limit: the thread has the settings that PyTorch has in each thread (`set_flush_denormal`) as they were when it
began.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import Context, copy_context
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import StoreError

from .forks import end_before_forks
from .lanes import Noted, ThreadLane, is_lane

STOPPED = (
    "overspill: the host was updating {}, which may be updated in part{}; load a checkpoint, or the state dicts of "
    "model and optimizer from before"
)
_STOPPED_UPDATE = "stopped_update"


class HostUpdate:
    """One update, waiting, running or done."""

    def __init__(
        self,
        what: str,
        run: Callable[[], None],
        ready: Callable[[], ExitStack],
        begun: Callable[[HostUpdate], None],
        over: Callable[[], None],
        lane: HostLane,
        noted: Noted | None,
    ) -> None:
        """Create the update `what` by `run()`, in the context of `lane`.

        `ready()` waits for what it reads, and gives it back at the end. `begun` gets the update whenever it is started,
        and `over()` is called whenever it ends.
        """
        self.what = what
        self.is_done = self.has_begun = False
        self._run: Callable[[], None] | None = run
        self._ready: Callable[[], ExitStack] | None = ready
        self._begun: Callable[[HostUpdate], None] | None = begun
        self._over = over
        self._failure = lane.failure
        self._noted = noted
        self._context: Context | None = lane.context
        self._threads = torch.get_num_threads()
        self._then: list[Callable[[], None]] = []
        self._changes = Lock()
        self._pending = Lock()

    def begin(self, thread: ThreadLane) -> None:
        """Have `thread` carry it out, for the first time or again. Raises StoreError once that is closed."""
        assert self._begun is not None
        self._begun(self)  # while nothing waits for it: what is awaited there may be behind it
        self._pending.acquire()
        self.is_done = self.has_begun = False
        thread.carry_out(self)

    def carry_out(self, _copy: Any = None) -> None:
        """Update, unless an update before has failed."""
        run, context, failure = self._run, self._context, self._failure
        assert run is not None
        assert context is not None
        if failure.error is not None:
            failure.stopped.append(self)
        else:
            try:
                context.run(self._updated, run)
            except BaseException as error:  # noqa: BLE001 - raised by `HostLane.check`
                trace = error.__traceback__
                failure.is_whole = isinstance(error, StoreError) and not self.has_begun
                failure.update, failure.error = self, error.with_traceback(trace and trace.tb_next)
        del run, context
        self._finish(again=failure.error is not None and failure.is_whole)

    def _updated(self, run: Callable[[], None]) -> None:
        if torch.get_num_threads() != self._threads:  # by which kernels divide their work, and so their last bits
            torch.set_num_threads(self._threads)
        assert self._ready is not None
        with self._ready():
            self.has_begun = True
            if self._noted is not None:
                self._noted.begin()
            with torch.no_grad():
                run()
            if self._noted is not None:
                self._noted.end()

    def drop(self) -> None:
        """Mark the update as never to be carried out."""
        self._failure.stopped.append(self)
        self._finish()

    def forget(self) -> None:
        """Free what it holds."""
        self._run = self._ready = self._begun = self._context = None

    def _finish(self, *, again: bool = False) -> None:
        if not again:
            self.forget()  # before it is done: what they hold is free then
        self._over()
        with self._changes:
            self.is_done = True
        for call in self._then:
            call()
        self._then.clear()
        self._pending.release()

    def then(self, call: Callable[[], None]) -> None:
        """Call `call()` when it is done, before `wait` returns; at once if it is."""
        with self._changes:
            if not self.is_done:
                self._then.append(call)
                return
        call()

    def wait(self) -> None:
        """Wait until it is done."""
        with self._pending:
            pass


class StoppedUpdates:
    """The error of an update, with that and those that it has stopped."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.update: HostUpdate | None = None
        self.is_whole = False
        """Whether the update had not begun, so that all can begin again."""
        self.stopped: list[HostUpdate] = []


class HostLane:
    """Runs updates in order, in a thread that starts with the first."""

    def __init__(self) -> None:
        self.failure = StoppedUpdates()
        self.context = copy_context()
        """The context variables of updates that are submitted from now on."""
        self.ends_with_step = False
        """Whether a step waits for its updates at its end, because they make what the user's objects have."""
        self.has_failed = False
        """Whether the error of an update has been raised: some weights are updated, others are not."""
        self._again: list[HostUpdate] = []
        self._thread: ThreadLane | None = None
        self._last: HostUpdate | None = None
        end_before_forks(self)

    def submit(self, update: HostUpdate) -> None:
        """Start `update` behind all others. Raises the error of one that failed, and StoreError."""
        self.restart()
        self.check()
        if self._thread is None:
            self._thread = ThreadLane("update", _no_copy)
        self._last = update
        update.begin(self._thread)

    def restart(self) -> None:
        """Start those updates again that the store has stopped, and whose error has been raised."""
        again, self._again = self._again, []
        for update in again:
            assert self._thread is not None
            self._last = update
            update.begin(self._thread)

    def check(self) -> None:
        """Raise the error of an update that failed, once all behind it are stopped."""
        failure = self.failure
        if failure.error is None:
            return
        self.wait()
        error, failure.error, stopped = failure.error, None, [*failure.stopped]
        failure.stopped.clear()
        assert failure.update is not None
        if failure.is_whole:
            self._again = [failure.update, *stopped]
        else:
            self.has_failed = True
            others = f", and has not updated {listed([update.what for update in stopped])}" if stopped else ""
            error.__dict__[_STOPPED_UPDATE] = failure.update.what
            error.add_note(STOPPED.format(failure.update.what, others))
        failure.update = None
        try:
            raise error
        finally:
            del error

    def wait(self) -> None:
        """Wait until no update is left, if this is not the thread of the updates."""
        if self._last is not None and not is_lane():
            self._last.wait()
            self._last = None

    def finish(self) -> None:
        """Wait until no update is left, and raise the error of one that failed."""
        self.restart()
        self.wait()
        self.check()

    def close(self) -> None:
        """Finish, and end the thread."""
        try:
            self.finish()
        finally:
            self._again.clear()
            if self._thread is not None:
                self._thread.close()
                self._thread = None


def stopped_update(error: BaseException) -> str | None:
    """Return which update on the host raised `error`, or None."""
    found: str | None = vars(error).get(_STOPPED_UPDATE)
    return found


def _no_copy(_slot: Any, _memory: Tensor) -> None:
    raise AssertionError("the host's lane copies nothing")


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return `names`, of which `most` are named and the others counted."""
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} others" if rest > 0 else "")
