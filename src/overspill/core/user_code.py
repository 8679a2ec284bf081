"""What an error says of a user's model, in words: where it came from, and why the model is no single graph."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from .frames import in_package

_PAPERS = find_spec("overspill_papers")
OURS = tuple(Path(file).parent for file in (str(Path(__file__).parent), _PAPERS and _PAPERS.origin) if file)
"""The folders of Overspill's own packages."""
_STANDARD = sysconfig.get_path("stdlib")


def no_single_graph(error: BaseException) -> str:
    """Return why Dynamo, which raised `error`, cannot make one graph of a model, and what would work."""
    explanation = re.search(r"Explanation: (.+)", str(error))
    first = first_line(error)
    what = f"{first}: {explanation.group(1)}" if explanation else first
    place = place_in(str(error)) or place_in(str(error), packages=True)
    return (
        f"the model does not compile to one graph, as a plan needs ({type(error).__name__}{place}: "
        f"{what.rstrip('.')}); overspill.compile(model, budget=...) in your own loop takes graph breaks"
    )


def is_graph_break(error: BaseException) -> bool:
    """Return whether Dynamo, which raised `error`, cannot trace the model; otherwise what it traced has raised."""
    first = root(error)
    return type(first).__module__.startswith("torch._dynamo") and not str(first).startswith("raised exception ")


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


def is_a_librarys(path: str) -> bool:
    """Return whether the file at `path` is Python's own or that of an installed package."""
    return path.startswith(_STANDARD) or in_package(path)


def _is_the_users(path: str) -> bool:
    return not path.startswith((*map(str, OURS), "<")) and not is_a_librarys(path)
