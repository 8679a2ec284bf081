"""Make Python functions of compiled programs' calls, for nodes of a graph.

A function takes the root tensors that its call uses, and makes views of them. It allocates the tensors that the call
writes first (unless they are given too). Then it runs the program's own statements, and returns the roots of new
tensors.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from .storages import Call, Storages
from .text import Text, made_by, sources


class ProgramFunction:
    """One call of a program, or an output's expression if `call` is None.

    It takes the variables `takes`, and returns those of `makes`: one, or a tuple of several. `updates` are the
    positions of arguments that it changes in place; if there are any, it always returns a tuple. FX reads its name,
    `tags` and `updates` as those of an op.
    """

    allocates: Sequence[str] = ()
    """Those of `makes` that the function allocates itself, and no library call does."""
    given: Callable[[Sequence[str]], ProgramFunction]
    """Return a function for the same call that takes some of its allocations as leading arguments."""
    compile: Callable[[], None]
    """Compile it, with all functions that its programs have got so far and their kernels; it can run after that."""

    def __init__(
        self,
        name: str,
        takes: list[str],
        makes: list[str],
        call: Call | None = None,
        updates: tuple[int, ...] = (),
        tags: tuple[torch.Tag, ...] = (),
    ) -> None:
        self.__name__ = name
        self.takes = takes
        self.makes = makes
        self.call = call
        self.updates = updates
        self.tags = tags
        self.run: Callable[..., Any] | None = None

    def __call__(self, *values: Any) -> Any:
        """Run the call on `values`, in the order of `takes`."""
        assert self.run is not None  # whoever lowers a graph has its functions compiled
        return self.run(*values)

    def __str__(self) -> str:
        """Return the name of the call that runs, for messages."""
        return self.__name__ if self.call is None else self.call.name


class Functions:
    """Makes the functions of `programs`; they can run after `compile`."""

    def __init__(self, programs: Storages) -> None:
        self._programs = programs
        self._made: list[ProgramFunction] = []
        self._source = ""
        self._count = 0

    def of_call(self, call: Call, given: Sequence[str] = ()) -> ProgramFunction:
        """Return the function of `call`; the allocations `given` are its leading arguments."""
        programs = self._programs
        makes = made_by(programs, call)
        takes = [*given, *(name for name in sources(programs, call.uses) if name not in makes)]
        updates = tuple(i for i, name in enumerate(takes) if programs.key_of(name) in call.updated)
        # Its text: views of what it takes, the call's own statements, and the new roots.
        text = Text(programs, takes)
        text.call(call)
        if makes:
            text.line("return " + ", ".join(makes) + ("," if len(makes) > 1 or updates else ""))
        tags = (torch.Tag.nondeterministic_seeded,) if call.random else ()
        function = ProgramFunction(self._name(call.name), takes, makes, call, updates, tags)
        function.allocates = [name for name in makes if name in programs.allocations]
        function.given = partial(self.of_call, call)
        return self._add(function, text)

    def of_expression(self, expression: ast.expr) -> ProgramFunction:
        """Return the function that returns an output's value: a view."""
        takes = sources(self._programs, (n.id for n in ast.walk(expression) if isinstance(n, ast.Name)))
        text = Text(self._programs, takes)
        text.line(f"return {text.expression(expression)}")
        return self._add(ProgramFunction(self._name("view"), takes, []), text)

    def compile(self) -> None:
        """Compile the functions made since the last time, and the kernels. Raises UnsupportedError."""
        namespace = self._programs.compiled_namespace
        exec(compile(self._source, "<calls of Inductor's programs>", "exec"), namespace)  # noqa: S102
        for function in self._made:
            function.run = namespace[function.__name__]
        self._source, self._made = "", []

    def _name(self, name: str) -> str:
        self._count += 1
        return f"call_{self._count}_{''.join(c if c.isalnum() else '_' for c in name)}"

    def _add(self, function: ProgramFunction, text: Text) -> ProgramFunction:
        self._source += text.function(function.__name__, ", ".join(function.takes))
        self._made.append(function)
        function.compile = self.compile
        return function


def compile_functions(graph: fx.Graph) -> None:
    """Compile the functions of programs in `graph`, and their kernels. Raises UnsupportedError."""
    for compile_all in {node.target.compile for node in graph.nodes if isinstance(node.target, ProgramFunction)}:
        compile_all()  # once for all functions of the same programs


def allocated_as(root: fx.Node) -> str | None:
    """Return the variable of a root that its call allocates itself, or None."""
    item = root.target is operator.getitem
    node, place = root.args if item else (root, 0)
    if not (isinstance(node, fx.Node) and isinstance(node.target, ProgramFunction) and isinstance(place, int)):
        return None
    made = node.target.makes[place : place + 1]
    return next((name for name in made if name in node.target.allocates), None)
