"""The line and the exit code of an exception, for users."""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import overspill
from overspill.core.errors import InfeasibleBudgetError, OverspillError, RequestError, is_out_of_memory, with_remedy
from overspill.core.frames import in_package

WRONG_REQUEST = 2
OUTSIDE_FAILURE = 3
DEBUG_HINT = "OVERSPILL_DEBUG=1 shows the traceback"
QUOTES, NEWLINE_IN_REPR = "\"'", "\\n"

# A call in Python, which stays as it is, or an argument as errors write it: `lora=16`, `placement='planned'`,
# `quantize=`.
_ARGUMENT = re.compile(
    r"""(?<![\w.])[\w.]+\([^()]*\)|(?<![\w.,:=/'"-])([a-z]+(?:_[a-z]+)*)=('[^']*'|"[^"]*"|[\w.%+-]*)"""
)

_PAPERS = find_spec("overspill_papers")
_OURS = tuple(Path(file).parent for file in (overspill.__file__, _PAPERS and _PAPERS.origin) if file)
_STANDARD = sysconfig.get_path("stdlib")
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
        return Failure(f"memory ran out ({_first_line(error) or type(error).__name__}); {advice}", OUTSIDE_FAILURE)
    if _is_from_dynamo(error):
        return Failure(_compiler_said(error), WRONG_REQUEST)
    if _is_ours(error):
        return Failure(
            f"Overspill itself failed, which is a defect of it ({_named(error)}); {DEBUG_HINT}", OUTSIDE_FAILURE
        )
    return Failure(_model_raised(_named(error), _traceback_place(error)), WRONG_REQUEST)


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
        return Failure(message, error.exit_code)
    floor = {
        "floor_bytes": error.floor_bytes,
        "budget_bytes": error.budget_bytes,
        "cause": error.cause,
        "feasible": False,
    }
    would_do = f"budget={error.floor_bytes} would do"
    if error.most_bytes is not None and error.floor_bytes > error.most_bytes:
        would_do = "no budget on this GPU would do"
    is_said = any(said in message for said in (would_do, f'budget="{error.floor_bytes}B" would do'))
    return Failure(message if is_said else with_remedy(message, would_do), error.exit_code, floor)


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
    place = _place_in(str(error))
    root = _root(error)
    if not _is_from_dynamo(root):
        return _model_raised(_named(root), place)
    if raised := re.match(r"raised exception (\w+)\((.*)\)", str(root), re.DOTALL):  # Dynamo gives the repr alone
        name, argument = raised.groups()
        said = argument.strip(QUOTES).split(NEWLINE_IN_REPR)[0]
        return said if name == RequestError.__name__ else _model_raised(f"{name}: {said}", place)
    explanation = re.search(r"Explanation: (.+)", str(error))
    what = f"{_first_line(error)}: {explanation.group(1)}" if explanation else _first_line(error)
    return (
        f"the model does not compile to one graph, as `train` and `plan` need ({type(error).__name__}{place}: "
        f"{what.rstrip('.')}); "
        "overspill.compile(model, budget=...) in your own loop takes graph breaks"
    )


def _model_raised(what: str, place: str) -> str:
    return f"the model's own code{place} raised {what}; {DEBUG_HINT}"


def _root(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def _place_in(message: str) -> str:
    """Return the user's last line in `message`, as ` (net.py, line 6)`; empty for a built-in model."""
    found = re.findall(r'File "(.+)", line (\d+)', message)
    return next((_spell_place(path, line) for path, line in reversed(found) if _is_the_users(path)), "")


def _traceback_place(error: Exception) -> str:
    """Return the user's last line that `error` passed."""
    frames = reversed(traceback.extract_tb(error.__traceback__))
    return next((_spell_place(f.filename, f.lineno or 0) for f in frames if _is_the_users(f.filename)), "")


def _spell_place(path: str, line: str | int) -> str:
    return f" ({Path(path).name}, line {line})"


def _is_the_users(path: str) -> bool:
    return not path.startswith((*map(str, _OURS), "<")) and not _is_a_librarys(path)


def _is_a_librarys(path: str) -> bool:
    return path.startswith(_STANDARD) or in_package(path)


def _is_ours(error: Exception) -> bool:
    """Return whether Overspill, not the model, raised `error`, by the deepest frame outside of libraries."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        for root in _OURS:
            if path.is_relative_to(root):
                return not path.relative_to(root).as_posix().startswith(_THE_MODELS_CALLERS)
        if not _is_a_librarys(frame.filename):
            return False  # the user's file, or a graph that was generated from the model
    return True


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {_first_line(error).rstrip('.')}"


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
