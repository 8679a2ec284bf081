"""What an error says of a user's model, in words: where it came from, and why the model is no single graph."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

from .frames import in_package

_PAPERS = find_spec("overspill_papers")
OURS = tuple(Path(file).parent for file in (str(Path(__file__).parent), _PAPERS and _PAPERS.origin) if file)
"""The folders of Overspill's own packages."""
THE_MODELS = "the model's own code"
"""How messages about errors of a user's model begin."""
_STANDARD = sysconfig.get_path("stdlib")


def no_single_graph(error: BaseException) -> str:
    """Return why Dynamo, which raised `error`, cannot make one graph of a model, and what would work."""
    explanation = re.search(r"Explanation: (.+)", str(error))
    first = first_line(error)
    what = f"{first}: {explanation.group(1)}" if explanation else first
    place = place_in(str(error)) or place_in(str(error), packages=True)
    name = type(error).__name__
    if follows_values(error):
        name, what = "by values", "a branch, or a number of rows, follows from values"
    return (
        f"the model does not compile to one graph, as a plan needs ({name}{place}: "
        f"{what.rstrip('.')}); overspill.compile(model, budget=...) in your own loop takes graph breaks"
    )


def is_graph_break(error: BaseException) -> bool:
    """Return whether Dynamo, which raised `error`, cannot trace the model; otherwise what it traced has raised."""
    first = root(error)
    return type(first).__module__.startswith("torch._dynamo") and not str(first).startswith("raised exception ")


def follows_values(error: BaseException) -> bool:
    """Return whether a branch of the model, or a number of rows, follows from values, on which `error` stopped."""
    return type(root(error)).__name__ == "GuardOnDataDependentSymNode"


def root(error: BaseException) -> BaseException:
    """Return the error at the end of the chain of causes."""
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    return error


def place_in(message: str, *, packages: bool = False) -> str:
    """Return the user's last line in `message`, as ` (net.py, line 6)`; empty for a built-in model.

    With `packages`, lines of installed packages count too.
    """
    return last_place(re.findall(r'File "(.+)", line (\d+)', message), packages=packages)


def last_place(places: Iterable[tuple[str, str | int]], *, packages: bool = False) -> str:
    """Return the last of `places`, files and lines, that is the user's, as ` (net.py, line 6)`; empty if none is."""
    theirs = ((path, line) for path, line in reversed([*places]) if packages or _is_the_users(path))
    return next((f" ({Path(path).name}, line {line})" for path, line in theirs), "")


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error` that has any text."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def model_raised(error: BaseException) -> str:
    """Return that a user's model raised `error`, with their last line and the layer that it passed."""
    frames = [*walk_tb(error.__traceback__)]
    place = last_place([(frame.f_code.co_filename, line) for frame, line in frames])
    calls = (frame for frame, _ in frames if frame.f_code.co_name == "_call_impl")  # of modules; Dynamo has one too
    called = [frame.f_locals["self"] for frame in calls if frame.f_globals["__name__"] == "torch.nn.modules.module"]
    return raised_by_model(named(error), place, _layer_among(called))


def raised_by_model(what: str, place: str, layer: str = "") -> str:
    """Return that a user's model raised `what`: at a place as of `last_place`, and in a layer, if they are known."""
    return f"{THE_MODELS}{place} raised {what}{layer and f', in {layer}'}"


def _layer_among(called: Sequence[Any]) -> str:
    """Return the last of these modules, each called by the one before, by its name in the first that is the user's."""
    theirs = [module for module in called if not type(module).__module__.startswith(f"{__package__.split('.')[0]}.")]
    if len(theirs) < 2:
        return ""
    names = {id(module): name for name, module in theirs[0].named_modules()}
    name = names.get(id(theirs[-1]))
    return f"layer {name} ({type(theirs[-1]).__name__})" if name else ""


def named(error: BaseException) -> str:
    """Return the name of `error` with the first line of what it says."""
    return f"{type(error).__name__}: {first_line(error).rstrip('.')}"


def is_a_librarys(path: str) -> bool:
    """Return whether the file at `path` is Python's own or that of an installed package."""
    return path.startswith(_STANDARD) or in_package(path)


def _is_the_users(path: str) -> bool:
    return not path.startswith((*map(str, OURS), "<")) and not is_a_librarys(path)
