"""Reset threads, locks and shared files in a forked child."""

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


def tell_of_forks(thing: Forkable) -> None:
    """Call `thing.forked()` in every child that is forked while `thing` lives."""
    _LIVING.add(thing)


class ForkedLock:
    """A process-wide re-entrant lock that a forked child replaces."""

    def __init__(self) -> None:
        self.lock = RLock()
        tell_of_forks(self)

    def forked(self) -> None:
        """Make a new lock, held by no thread."""
        self.lock = RLock()


def _in_child() -> None:
    for thing in list(_LIVING):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)
