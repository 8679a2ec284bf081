"""End threads before a fork; reset threads, locks and shared files in the child."""

from __future__ import annotations

import os
import weakref
from threading import RLock
from typing import Protocol


class Forkable(Protocol):
    """An object that must be reset in a forked child."""

    def forked(self) -> None:
        """Reset the object in the child, before other code runs there."""


_LIVING: weakref.WeakSet[Forkable] = weakref.WeakSet()


class Ending(Protocol):
    """An object whose thread has to be idle when the process is forked."""

    def wait(self) -> None:
        """Wait until the thread is idle."""


_ENDING: weakref.WeakSet[Ending] = weakref.WeakSet()


def tell_of_forks(thing: Forkable) -> None:
    """Call `thing.forked()` in every child that is forked while `thing` lives."""
    _LIVING.add(thing)


def end_before_forks(thing: Ending) -> None:
    """Call `thing.wait()` before each fork of this process while `thing` lives."""
    _ENDING.add(thing)


class ForkedLock:
    """A process-wide re-entrant lock that a forked child replaces."""

    def __init__(self) -> None:
        self.lock = RLock()
        tell_of_forks(self)

    def forked(self) -> None:
        """Make a new lock, held by no thread."""
        self.lock = RLock()


def _before() -> None:
    for thing in list(_ENDING):
        thing.wait()


def _in_child() -> None:
    for thing in list(_LIVING):
        thing.forked()


os.register_at_fork(before=_before, after_in_child=_in_child)
