"""Things selected by name, built in or added by installed packages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pkgutil import iter_modules
from typing import Generic, TypeVar

from .errors import RequestError
from .text import pip_install

T = TypeVar("T")


def did_you_mean(name: str, known: Iterable[str], *, most: int = 1, shown_as: Mapping[str, str] | None = None) -> str:
    """Return `; did you mean 'auto'?` for a close name, otherwise a full stop.

    It ends the first sentence of a message. `shown_as` maps aliases to the names to show. Names that begin
    with `name` come first, then that with the fewest typing mistakes, and of several such the first of `known`.
    """
    typed, names = name.lower(), tuple(known)
    close_enough = get_close_matches(typed, names, n=len(names), cutoff=0.5) if names else []
    found = sorted(close_enough, key=lambda known: _order(typed, known, names))[:most]
    close = dict.fromkeys((shown_as or {}).get(key, key) for key in found)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."


def _order(typed: str, known: str, names: tuple[str, ...]) -> tuple[int, int]:
    return 0 if known.startswith(typed) else _mistakes(typed, known), names.index(known)


def _mistakes(typed: str, meant: str) -> int:
    """Return how many letters are missing, too many, wrong or swapped: the edit distance."""
    rows = [list(range(len(meant) + 1))]
    for at, letter in enumerate(typed, 1):
        row = [at]
        for to, other in enumerate(meant, 1):
            least = min(rows[-1][to] + 1, row[-1] + 1, rows[-1][to - 1] + (letter != other))
            if at > 1 < to and (letter, typed[at - 2]) == (meant[to - 2], other):
                least = min(least, rows[-2][to - 2] + 1)
            row.append(least)
        rows.append(row)
    return rows[-1][-1]


def classes_in(package: str, base: type[T]) -> dict[str, type[T]]:
    """Return the subclasses of `base` in modules of `package`, by their `name`."""
    found: dict[str, type[T]] = {}
    for info in iter_modules(import_module(package).__path__):
        module = import_module(f"{package}.{info.name}")
        for thing in vars(module).values():
            if isinstance(thing, type) and issubclass(thing, base) and "name" in vars(thing):
                found[vars(thing)["name"]] = thing
    return dict(sorted(found.items()))


class Registry(Mapping[str, T], Generic[T]):
    """Things of one kind by name, with those of entry point group `overspill.<plural>`.

    A package adds a policy `mine` by `[project.entry-points."overspill.policies"] mine = "package.module:Mine"` in its
    pyproject.toml. `register` adds one to the running process. Built-in names cannot be replaced. `papers` are names
    that the package overspill-papers adds. Names are sorted if `by_name`; otherwise built-in ones come first, in their
    order.
    """

    def __init__(
        self, kind: str, plural: str, own: Mapping[str, T], papers: Iterable[str] = (), *, by_name: bool = False
    ) -> None:
        self.kind, self.plural, self.papers, self._by_name = kind, plural, frozenset(papers), by_name
        self._known: dict[str, T] = dict(own)

    def register(self, name: str, thing: T) -> None:
        """Add `thing` under a new name. Raises RequestError if the name is taken."""
        if name in self:
            raise RequestError(f"there is a {self.kind} {name!r} already; choose another name")
        self._known[name] = thing

    def loaded(self) -> tuple[dict[str, T], list[str]]:
        """Return all that can be loaded, by name, and error lines for the rest."""
        found, broken = dict[str, T](), []
        for name in self:
            try:
                found[name] = self[name]
            except RequestError as error:
                broken.append(str(error))
        return found, broken

    def check_installed(self, name: str) -> None:
        """Raise RequestError if `name` needs overspill-papers and that is not installed."""
        if name in self.papers and name not in self:
            raise RequestError(f"the {self.kind} {name!r} needs the overspill-papers package: {pip_install('papers')}")

    def named(self, name: str) -> T:
        """Return the thing registered as `name`. Raises RequestError listing the known names."""
        self.check_installed(name)
        if name not in self:
            raise RequestError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self)} {self.plural.capitalize()}: {', '.join(self)}"
            )
        return self[name]

    def __getitem__(self, name: str) -> T:
        if name not in self._known:
            self._known[name] = self._loaded(self._entry_points[name])
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*self._known, *self._entry_points))
        yield from sorted(names) if self._by_name else names

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in self._known or name in self._entry_points

    @cached_property
    def _entry_points(self) -> dict[str, EntryPoint]:
        return {point.name: point for point in entry_points(group=f"overspill.{self.plural}")}

    def _loaded(self, point: EntryPoint) -> T:
        """Load an entry point. Raises RequestError if its package cannot be imported."""
        try:
            thing: T = point.load()
        except Exception as error:
            package = point.dist.name if point.dist is not None else point.value
            raise RequestError(
                f"{self.kind} {point.name!r} of the package {package} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        return thing
