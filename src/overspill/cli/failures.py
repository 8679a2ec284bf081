"""The line and the exit code of an exception, for users."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overspill.core.errors import InfeasibleBudgetError, OverspillError, RequestError, is_out_of_memory, with_remedy
from overspill.core.units import size_enough
from overspill.core.user_code import (
    OURS,
    THE_MODELS,
    first_line,
    follows_values,
    is_a_librarys,
    model_raised,
    named,
    no_single_graph,
    place_in,
    raised_by_model,
    root,
)

WRONG_REQUEST = 2
OUTSIDE_FAILURE = 3
DEBUG_HINT = "OVERSPILL_DEBUG=1 shows the traceback"
QUOTES, NEWLINE_IN_REPR = "\"'", "\\n"

# A call in Python, which stays as it is, or an argument as errors write it: `lora=16`, `placement='planned'`,
# `quantize=`.
_ARGUMENT = re.compile(
    r"""(?<![\w.])[\w.]+\([^()]*\)|(?<![\w.,:=/'"-])([a-z]+(?:_[a-z]+)*)=('[^']*'|"[^"]*"|[\w.%+-]*)"""
)

# What these call and what fails in it is the model's: building it, calling it, its optimizer.
_THE_MODELS_CALLERS = ("models/", "runtime/training.py", "runtime/compiled/compile.py", "runtime/tracker.py", "cli/")


@dataclass(frozen=True)
class Failure:
    """One line for the user, the exit code, and JSON fields."""

    message: str
    exit_code: int
    details: Mapping[str, Any] = field(default_factory=dict)


def explain(error: Exception) -> Failure:
    """Return the failure that users see of `error`."""
    error = _inner(error)
    if hasattr(error, "format_message"):  # a usage error of typer, whose class has moved between its versions
        return Failure(_usage(error), WRONG_REQUEST)
    if isinstance(error, OverspillError):
        return _on_purpose(error)
    if is_out_of_memory(error):
        advice = "a smaller --budget or --batch, or --store disk, takes less"
        return Failure(f"memory ran out ({first_line(error) or type(error).__name__}); {advice}", OUTSIDE_FAILURE)
    if _is_from_dynamo(error) or follows_values(error):
        return Failure(_compiler_said(error), WRONG_REQUEST)
    if _is_ours(error):
        return Failure(
            f"Overspill itself failed, which is a defect of it ({named(error)}); {DEBUG_HINT}", OUTSIDE_FAILURE
        )
    return Failure(f"{model_raised(error)}; {DEBUG_HINT}", WRONG_REQUEST)


def in_options(message: str, options: Iterable[str]) -> str:
    """Return `message` with arguments written as options of the command.

    Errors name arguments as Python does. Only arguments that are `options` of a command are rewritten.
    """
    known = set(options)

    def spell(found: re.Match[str]) -> str:
        name, value = found.groups()
        option = f"--{name.replace('_', '-')}" if name else ""
        if option not in known:
            return found[0]
        return option if value in ("", "True") else f"{option} {value.strip(QUOTES)}"

    return _ARGUMENT.sub(spell, message)


def _on_purpose(error: OverspillError) -> Failure:
    message = _without_frames(" ".join(str(error).split()))
    if not isinstance(error, InfeasibleBudgetError):
        return Failure(f"{message}; {DEBUG_HINT}" if message.startswith(THE_MODELS) else message, error.exit_code)
    floor = {
        "floor_bytes": error.floor_bytes,
        "budget_bytes": error.budget_bytes,
        "cause": error.cause,
        "feasible": False,
    }
    would_do = f'budget="{size_enough(error.floor_bytes)}" would do'
    if error.most_bytes is not None and error.floor_bytes > error.most_bytes:
        would_do = "no budget on this GPU would do"
    return Failure(message if would_do in message else with_remedy(message, would_do), error.exit_code, floor)


def _without_frames(message: str) -> str:
    """Return `message` without the C++ frames that torch appends to some of its messages."""
    return message.partition(" Exception raised from ")[0]


def _inner(error: Exception) -> Exception:
    """Return the error of a compiler backend, without Dynamo's wrapping."""
    inner = getattr(error, "inner_exception", None)
    return inner if isinstance(inner, Exception) else error


def _usage(error: Exception) -> str:
    """Return the usage error, and which help to read."""
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", None) or "overspill"
    message = " ".join(str(error.format_message()).split()).rstrip(".")  # type: ignore[attr-defined]
    return f"{message}{'' if message.endswith('?') else ';'} see `{command} --help`"


def _is_from_dynamo(error: BaseException) -> bool:
    return type(error).__module__.startswith("torch._dynamo")


def _compiler_said(error: Exception) -> str:
    """Return the failure behind an error of Dynamo's.

    It is an exception of the model's own, or code that does not go into one graph.
    """
    place = place_in(str(error))
    first = root(error)
    if not _is_from_dynamo(first) and not follows_values(error):
        return f"{raised_by_model(named(first), place)}; {DEBUG_HINT}"
    if raised := re.match(r"raised exception (\w+)\((.*)\)", str(first), re.DOTALL):  # Dynamo gives the repr alone
        name, argument = raised.groups()
        said = argument.strip(QUOTES).split(NEWLINE_IN_REPR)[0]
        return said if name == RequestError.__name__ else f"{raised_by_model(f'{name}: {said}', place)}; {DEBUG_HINT}"
    return no_single_graph(error)


def _is_ours(error: Exception) -> bool:
    """Return whether Overspill, not the model, raised `error`, by the deepest frame outside of libraries."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        for folder in OURS:
            if path.is_relative_to(folder):
                return not path.relative_to(folder).as_posix().startswith(_THE_MODELS_CALLERS)
        if not is_a_librarys(frame.filename):
            return False  # the user's file, or a graph that was generated from the model
    return True
