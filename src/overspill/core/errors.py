"""Errors that Overspill raises on purpose, with the exit code of the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_INFEASIBLE = "infeasible: "
"""How the message of an InfeasibleBudgetError begins."""


class OverspillError(Exception):
    """Base of all errors raised on purpose; `exit_code` is the command line's.

    Some are one of Python's errors as well, which a caller may catch already.
    """

    exit_code = 3


class RequestError(OverspillError, ValueError):
    """The request is wrong: an unknown name, malformed size, or impossible combination.

    If it is about a Job, `fields` names those with a wrong value, or those that do not go together.
    """

    exit_code = 2

    def __init__(self, message: str, *, fields: Iterable[str] = ()) -> None:  # noqa: ARG002 - `__new__` keeps it
        # Dynamo, where a loss is refused while it is traced, cannot call the base's `__init__`.
        self.fields = tuple(fields)


class UnsupportedError(OverspillError):
    """The model does something that Overspill does not support.

    The message says what, and what would work.
    """

    exit_code = 2


@dataclass(frozen=True)
class Amount:
    """Bytes of a part of the whole, or of the whole after a change."""

    what: str
    nbytes: int


class InfeasibleBudgetError(OverspillError, RuntimeError):
    """No schedule of this policy fits the budget.

    Where models train it is a `torch.OutOfMemoryError` too, so that a loop that halves its batch halves it here.
    `floor_bytes` is the smallest budget that works. `cause` names the op and the tensors that need it. If known,
    `parts` add up to `floor_bytes`, `changes` are what it would be after a change of settings, and `hints` are other
    remedies. The message has all of that in words. `crowded` means that the live tensors would fit, but not as the
    allocator places them. `most_bytes` is the largest budget that the device allows, if that is known.
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
        crowded: bool = False,
        most_bytes: int | None = None,
    ) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.floor_bytes = floor_bytes
        self.cause = cause
        self.parts = parts
        self.changes = changes
        self.hints = hints
        self.crowded = crowded
        self.most_bytes = most_bytes

    def with_help(self, more: str, remedy: str = "") -> InfeasibleBudgetError:
        """Return the same error with `more` appended to its message, and the `remedy` before all else."""
        message = with_remedy(str(self), remedy) if remedy else str(self)
        return InfeasibleBudgetError(
            f"{message}{more}", **_given(self) | {"hints": (*self.hints, *filter(None, [more.strip("; "), remedy]))}
        )

    def with_floor(self, floor_bytes: int) -> InfeasibleBudgetError:
        """Return the same error with another smallest budget, in bytes."""
        return InfeasibleBudgetError(str(self), **_given(self) | {"floor_bytes": floor_bytes})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with keyword arguments, to pass the error between processes."""
        return _rebuilt, (type(self), str(self), _given(self))


class UnplannedError(OverspillError, RuntimeError):
    """A call ran partly or wholly unplanned, so the budget was not enforced.

    The message says why and what would work.
    """


class StoreError(OverspillError, OSError):
    """The store could not hold or return bytes, as on a full disk."""


class InvalidScheduleError(OverspillError, ValueError):
    """A schedule breaks the rules of `simulate.check`: a defect of its policy."""


class PolicyError(OverspillError):
    """A policy of another package failed; the message says which, and where."""

    exit_code = 2


class InvalidLayoutError(OverspillError, ValueError):
    """A layout puts live blocks on the same bytes, or exceeds its bounds."""


class OutOfMemoryError(OverspillError, RuntimeError):
    """An allocator found too little free memory on its device, even after freeing its caches.

    `requested_bytes` is the size of the request, `reserved_bytes` what the allocator held then. `capacity_bytes` is the
    device's size; None: unlimited but for its address space.
    """

    exit_code = 1

    def __init__(self, message: str, *, requested_bytes: int, reserved_bytes: int, capacity_bytes: int | None) -> None:
        super().__init__(message)
        self.requested_bytes = requested_bytes
        self.reserved_bytes = reserved_bytes
        self.capacity_bytes = capacity_bytes

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle with keyword arguments, as InfeasibleBudgetError."""
        return _rebuilt, (type(self), str(self), _given(self))


def with_remedy(message: str, remedy: str) -> str:
    """Return the message of an InfeasibleBudgetError with the `remedy` first."""
    return f"{_INFEASIBLE}{remedy}; {message.removeprefix(_INFEASIBLE)}"


def _given(error: OverspillError) -> dict[str, Any]:
    """Return the arguments that the error was made with, without those that Dynamo adds to errors passing through."""
    return {name: value for name, value in vars(error).items() if name in type(error).__init__.__annotations__}


def _rebuilt(kind: type[OverspillError], message: str, fields: dict[str, Any]) -> OverspillError:
    return kind(message, **fields)


# For a tensor (torch), a kernel's code and scratch (oneDNN), C++ objects, a thread's stack, Dynamo.
_MEMORY_RAN_OUT = re.compile(
    "can't allocate memory|could not create a primitive(?! descriptor)|std::bad_alloc|"
    "can't start new thread|^MemoryError",
    re.MULTILINE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` reports that memory ran out: Python's, torch's, or that of a library below."""
    # By its name, because torch need not be loaded. An allocator's, of that name too, is of a simulated device.
    of_torch = type(error).__name__ == "OutOfMemoryError" and not isinstance(error, OverspillError)
    return isinstance(error, MemoryError) or of_torch or _MEMORY_RAN_OUT.search(str(error)) is not None
