"""Record the reads of the model's Python during a capture in a `PythonState`.

`nn.Module` is patched to report accesses of the capturing thread while the capture lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn

from overspill.core.errors import UnsupportedError

from .python_state import Changed, PythonState

T = TypeVar("T")


def watched(capture: Callable[[Callable[[], None]], T], spelled: Callable[[T], str]) -> tuple[T, PythonState]:
    """Return the result of `capture`, and the Python state that it depends on.

    Models set attributes at their first call that keep their values afterwards. So if the state has changed, the step
    is captured once more. If the result is `spelled` alike and nothing changes any more, the change does not matter.
    `capture` gets a function to call before each pass over the model's Python. It makes the pass begin as the first one
    did. Raises UnsupportedError (`PythonState.settle`).
    """
    first: list[T] = []
    try:
        with watching() as state:
            first.append(capture(state.undo))
    except Changed as change:
        if not first or change.for_good:
            raise
        # Capture again, from the state after the first call.
        try:
            with watching() as state:
                again = capture(state.undo)
            if spelled(again) == spelled(first[0]):
                return again, state
        except UnsupportedError:  # it changes again, or reads what the first call has set
            pass
        change.state.undo()
        raise
    return first[0], state


@contextmanager
def watching() -> Iterator[PythonState]:
    """Note module reads and writes of this thread within the context. Raises UnsupportedError at its end (`settle`)."""
    state = PythonState()
    me = threading.get_ident()
    plain_init, plain_set = nn.Module.__init__, nn.Module.__setattr__

    # Report accesses of the capturing thread only.
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == me:
            state.begin_module(self)
        plain_init(self, *args, **kwargs)

    def get(self: nn.Module, name: str) -> Any:
        if threading.get_ident() == me:
            state.read(self, name)
        return object.__getattribute__(self, name)

    def put(self: nn.Module, name: str, value: Any) -> None:
        if threading.get_ident() == me:
            state.write(self, name)
        plain_set(self, name, value)

    # Patch nn.Module; without a capture it has no `__getattribute__` of its own.
    nn.Module.__init__, nn.Module.__setattr__ = init, put
    nn.Module.__getattribute__ = get
    try:
        yield state
    except BaseException as error:
        _unwatched(plain_init, plain_set)
        state.put_back()
        try:
            state.drop_fakes()
        except Changed as cause:  # a tensor of the capture's first pass came into its second
            raise cause from error
        raise
    _unwatched(plain_init, plain_set)
    state.settle()


def _unwatched(init: Any, put: Any) -> None:
    nn.Module.__init__, nn.Module.__setattr__ = init, put
    del nn.Module.__getattribute__
