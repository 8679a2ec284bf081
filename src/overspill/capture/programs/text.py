"""Write Python text that runs calls of compiled programs."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from torch import Tensor

from overspill.core.errors import InvalidScheduleError

from .storages import Call, Storages


class Text:
    """Lines of a function that runs calls, with `bound` as known variables."""

    def __init__(self, programs: Storages, bound: Iterable[str] = ()) -> None:
        self.programs = programs
        self.bound = set(bound)
        self.lines: list[str] = []

    def function(self, name: str, arguments: str = "args") -> str:
        """Return the text of the function, with its head."""
        return f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in self.lines)

    def line(self, text: str) -> None:
        """Add a line."""
        self.lines.append(text)

    def expression(self, expression: ast.expr) -> str:
        """Return the text of an expression, after lines that define its variables."""
        for name in _names(expression):
            self._bind(name)
        return ast.unparse(expression)

    def call(self, call: Call) -> None:
        """Add the statements of `call`, after the allocations and views that it needs."""
        # First the buffers that it is the first to write.
        for root in made_by(self.programs, call):
            if root in self.programs.allocations and root not in self.bound:
                self.line(ast.unparse(self.programs.allocations[root]))
                self.bound.add(root)
        for name in call.uses:
            self._bind(name)
        for statement in call.lines:
            self.line(ast.unparse(statement))
        self.bound.update(call.made)
        if call.container is not None:
            self.line(f"del {call.container}")

    def _bind(self, name: str) -> None:
        """Define a variable of the program as an alias of bound ones. Raises InvalidScheduleError if it is gone."""
        programs = self.programs
        if name in self.bound or name not in programs.values:
            return
        if name in programs.allocations and programs.key_of(name) in programs.unwritten:
            self.line(ast.unparse(programs.allocations[name]))
        elif name in programs.aliases:
            self.line(f"{name} = {self.expression(programs.aliases[name])}")
        else:
            raise InvalidScheduleError(f"{name} is not on the device where the schedule reads it")
        self.bound.add(name)


def made_by(programs: Storages, call: Call) -> list[str]:
    """Return the root variables of the storages that `call` writes first."""
    return [root for key in call.writes if key not in call.updated for root in programs.roots[key]]


def sources(programs: Storages, names: Iterable[str]) -> list[str]:
    """Return the root variables that `names` are made from."""
    found: dict[str, None] = {}

    def look(name: str) -> None:
        if name in programs.aliases:
            for source in _names(programs.aliases[name]):
                look(source)
        elif isinstance(programs.values.get(name), Tensor) and programs.key_of(name) not in programs.unwritten:
            found[name] = None

    for name in names:
        look(name)
    return list(found)


def _names(expression: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(expression) if isinstance(n, ast.Name)]
