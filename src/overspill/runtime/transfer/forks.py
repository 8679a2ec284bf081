"""What a forked child has of its parent: no thread but one, locks that nobody will release, and files that both write to."""

from __future__ import annotations

import os
import weakref
from threading import RLock
from typing import Protocol


class Forkable(Protocol):
    """What has something that a forked child cannot use."""

    def forked(self) -> None:
        """Called in the child, before anything else runs there."""


_LIVING: weakref.WeakSet[Forkable] = weakref.WeakSet()


def tell_of_forks(thing: Forkable) -> None:
    """Call `thing.forked()` in every child that is forked while `thing` lives."""
    _LIVING.add(thing)


class ForkedLock:
    """A lock of the whole process that a child has anew, whoever had it in its parent; its thread may take it again."""

    def __init__(self) -> None:
        self.lock = RLock()
        tell_of_forks(self)

    def forked(self) -> None:
        """Nobody has it here."""
        self.lock = RLock()


def _in_child() -> None:
    for thing in list(_LIVING):
        thing.forked()


os.register_at_fork(after_in_child=_in_child)
