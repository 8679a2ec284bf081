"""Parameters of policies, by name: `window:window=1GiB,every_step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean
from overspill.core.units import format_bytes, parse_bytes

_TRUE, _FALSE = ("yes", "true", "1"), ("no", "false", "0")


@dataclass(frozen=True)
class Parameter:
    """A setting of a policy that has a name of its own."""

    name: str
    field: str
    """The argument and the attribute of the policy's class."""
    help: str
    read: Callable[[str], Any]
    """Makes a value from the user's text."""
    default: Any = None
    """The value if none is given; None: the policy finds the best."""
    shown: Callable[[Any], str] = str
    """Makes a text from a value."""
    flag: bool = False
    """Whether it is set by its name alone."""

    def spelled(self, value: Any) -> str:
        """Return the parameter with `value`, as text that `read_parameters` accepts."""
        if self.flag:
            return self.name if value else f"{self.name}={_FALSE[0]}"
        return f"{self.name}={value}"


def size(name: str, field: str, text: str) -> Parameter:
    """Return a parameter that is a size in bytes, or 0."""
    return Parameter(name, field, text, lambda given: 0 if given == "0" else parse_bytes(given), shown=format_bytes)


def number(name: str, field: str, text: str) -> Parameter:
    """Return a parameter that is an integer of at least 0."""

    def read(given: str) -> int:
        if not (given.isascii() and given.isdecimal()):
            raise RequestError(f"{name}={given!r} is no whole number")
        return int(given)

    return Parameter(name, field, text, read)


def flag(name: str, field: str, text: str, *, default: bool = False) -> Parameter:
    """Return a parameter that is true or false."""

    def read(given: str) -> bool:
        if given.lower() not in (*_TRUE, *_FALSE, ""):
            raise RequestError(f"{name}={given!r} is neither yes nor no")
        return given.lower() not in _FALSE

    return Parameter(name, field, text, read, default, flag=True)


def choice(name: str, field: str, text: str, known: Sequence[str], default: str | None = None) -> Parameter:
    """Return a parameter that is one of the names `known`."""

    def read(given: str) -> str:
        if given not in known:
            raise RequestError(f"unknown {name} {given!r}{did_you_mean(given, known)} There are {', '.join(known)}")
        return given

    return Parameter(name, field, f"{text}: {', '.join(known)}", read, default)


def read_parameters(policy: str, known: Sequence[Parameter], text: str) -> dict[str, Any]:
    """Return the arguments that `P=V,Q` gives a policy. Raises RequestError."""
    by_name, found = {parameter.name: parameter for parameter in known}, dict[str, Any]()
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, given = part.partition("=")
        parameter = by_name.get(name)
        if parameter is None:
            raise RequestError(
                f"the policy {policy} has no parameter {name!r}{did_you_mean(name, by_name)} It has "
                f"{', '.join(by_name)}"
            )
        if not equals and not parameter.flag:
            raise RequestError(f"the policy {policy} needs a value of {name}: {policy}:{name}=…")
        found[parameter.field] = parameter.read(given)
    return found


def spelled_parameters(known: Sequence[Parameter], values: Mapping[str, Any]) -> str:
    """Return `P=V,Q` for the `values`, by field, that are not the defaults."""
    given = ((p, values.get(p.field, p.default)) for p in known)
    return ",".join(p.spelled(value) for p, value in given if value != p.default)
