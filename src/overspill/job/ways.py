"""Options of training: each field of Job describes itself, once for the command line, for checks and for errors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from overspill.core.errors import RequestError

INFERENCE, PIPELINE, COMPILED = "inference", "pp", "compiled"
"""Cases that a way goes with; in others it is refused by name."""


@dataclass(frozen=True)
class Way:
    """An option of a job: its type on the command line, and its description in one line."""

    kind: type
    default: Any
    help: str
    metavar: str | None
    positive: bool
    """Whether it is a number that must be above 0."""
    choices: tuple[str, ...]
    flag: str | None
    """The option as typer writes it, if not the field's name."""
    goes_with: frozenset[str]
    """The cases in which it is supported."""
    trained: bool
    """Whether `overspill train` takes it; otherwise it is for estimates and plans."""


def way(
    kind: type,
    default: Any,
    help: str,  # noqa: A002 - typer's word
    *goes_with: str,
    metavar: str | None = None,
    positive: bool = False,
    choices: tuple[str, ...] = (),
    flag: str | None = None,
    trained: bool = True,
) -> Any:
    """Return a field of Job that is an option of training.

    Without `goes_with` it is refused in every special case.
    """
    said = Way(kind, default, help, metavar, positive, choices, flag, frozenset(goes_with), trained)
    return field(default=default, metadata={"way": said})


def ways_of(job: Any) -> dict[str, Way]:
    """Return the `way` fields of a Job, or of its class, by name."""
    return {f.name: f.metadata["way"] for f in fields(job) if "way" in f.metadata}


def check_values(ways: Mapping[str, Way], holder: Any) -> None:
    """Raise RequestError for a field of `holder`, by its name among `ways`, whose value the way does not allow."""
    for name, said in ways.items():
        value = getattr(holder, name)
        if value is None:
            continue
        if said.positive and not value > 0:
            least = "; give 1 or more" if said.kind is int else ""
            raise RequestError(f"{name}={value} is not a positive number{least}", fields=[name])
        if said.choices and value not in said.choices:
            raise RequestError(f"unknown {name} {value!r}; choices: {', '.join(said.choices)}", fields=[name])


def refused_in(case: str, job: Any) -> Collection[str]:
    """Return the ways of a Job that do not go with `case`."""
    return [name for name, said in ways_of(job).items() if case not in said.goes_with]
