"""Every error that Overspill raises on purpose, each with the exit code that the command line gives it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


class OverspillError(Exception):
    """Base of all errors raised on purpose; `exit_code` is what the command line exits with."""

    exit_code = 3


class RequestError(OverspillError):
    """The request was wrong: unknown name, malformed size, impossible combination."""

    exit_code = 2


class UnsupportedError(OverspillError):
    """The model does something that Overspill does not handle; the message says what and what would work."""

    exit_code = 2


@dataclass(frozen=True)
class Amount:
    """So many bytes of something: of a part of what is needed, or of what is needed after a change."""

    what: str
    nbytes: int


class InfeasibleBudget(OverspillError):
    """No schedule of this policy fits the budget.

    `floor_bytes` is the smallest budget that works, `cause` names the op and the tensors that hold it up. Where they are
    known, `parts` say what `floor_bytes` are made of, `changes` what a change of the settings would make of them, and `hints`
    what else would do. The message has all of that in words.
    """

    exit_code = 1

    def __init__(
        self,
        message: str,
        *,
        budget_bytes: int,
        floor_bytes: int,
        cause: str,
        parts: tuple[Amount, ...] = (),
        changes: tuple[Amount, ...] = (),
        hints: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.cause = cause
        self.parts = parts
        self.changes = changes
        self.hints = hints

    def told(self, more: str) -> InfeasibleBudget:
        """The same error with `more` behind its message."""
        return InfeasibleBudget(f"{self}{more}", **_given(self) | {"hints": (*self.hints, more.strip("; "))})

    def with_floor(self, floor_bytes: int) -> InfeasibleBudget:
        """The same error where that is the smallest budget that works."""
        return InfeasibleBudget(str(self), **_given(self) | {"floor_bytes": floor_bytes})

    def __reduce__(self) -> tuple[Any, ...]:
        """For processes that pass it on: arguments by keyword are not pickled by themselves."""
        return _rebuilt, (type(self), str(self), _given(self))


class UnplannedError(OverspillError):
    """A call, or a part of it, ran without a plan, so the budget was not in force; the message says why and what would work."""


class StoreError(OverspillError):
    """The store could not hold or return bytes: disk full, short read, out of host memory."""


class InvalidSchedule(OverspillError):
    """The reference machine refused a schedule: a defect of the policy that made it."""


class PolicyError(OverspillError):
    """A policy of another package failed; the message says which, and where in its code."""

    exit_code = 2


class InvalidLayout(OverspillError):
    """A layout puts two live blocks on the same bytes, or breaks its own bounds."""


class OutOfMemory(OverspillError):
    """An allocator found no room on its device, after all that it does to make room.

    `requested_bytes` is what was asked, `reserved_bytes` what the allocator held then, `capacity_bytes` the device's
    size (None: unlimited but for its address space).
    """

    exit_code = 1

    def __init__(self, message: str, *, requested_bytes: int, reserved_bytes: int, capacity_bytes: int | None) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """As of InfeasibleBudget."""
        return _rebuilt, (type(self), str(self), _given(self))


def _given(error: OverspillError) -> dict[str, Any]:
    """What the error was made with; Dynamo adds to errors that pass through it."""
    return {name: value for name, value in vars(error).items() if name in type(error).__init__.__annotations__}


def _rebuilt(kind: type[OverspillError], message: str, fields: dict[str, Any]) -> OverspillError:
    return kind(message, **fields)


# Of a tensor (torch), of a kernel's code and scratch memory (oneDNN), of C++'s own objects, of a thread's stack, of Dynamo.
_MEMORY_RAN_OUT = re.compile(
    "can't allocate memory|could not create a primitive(?! descriptor)|std::bad_alloc|can't start new thread|^MemoryError",
    re.MULTILINE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is the way of Python, torch, or a library below them to say that memory ran out."""
    of_torch = type(error).__name__ == "OutOfMemoryError"  # by its name: torch need not be loaded
    return isinstance(error, MemoryError) or of_torch or _MEMORY_RAN_OUT.search(str(error)) is not None


def forgetful(error: Exception) -> Exception:
    """The same error without the frames that it came through, and what they hold."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
