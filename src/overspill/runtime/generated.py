"""Write a lowered program as one Python function, which runs it at the least cost to the host.

A call of the function costs no more than its ops. Each instruction is a line; each value is a local variable, deleted
after its last use. After an error, the line in its traceback gives the position, and the variables of that frame give
the values.

Known limits: this relies on `tb_lineno` and on a frame's `f_locals`, which Python keeps for a debugger. A debugger that
sets variables of the frame changes the run. Writing and compiling takes 60 µs an instruction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import getitem
from types import CodeType, TracebackType
from typing import Any, NamedTuple, Protocol

from torch import fx

from overspill.capture.compiled.whole_step import UPDATE, Mutation
from overspill.core import Verb
from overspill.runtime.emitter import DOES

_LITERALS = (int, bool, str, type(None))


class Line(NamedTuple):
    """One call of the program."""

    node: fx.Node
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    done_with: tuple[fx.Node, ...]
    """Values that are dead after the call."""
    mutation: Mutation | None
    """The change in place that the call makes, if any."""


class LineSource(Protocol):
    """The surroundings of a program's instructions."""

    constants: dict[fx.Node, Any]
    unused: list[fx.Node]
    """Inputs that no instruction uses."""
    results: Sequence[Any]


@dataclass(frozen=True)
class Generated:
    """The function for `instructions` from `first` on."""

    program: LineSource
    instructions: list[Line]
    first: int
    live: Sequence[fx.Node]
    """Nodes whose values the function takes."""
    asks: bool
    """Whether it calls `may_go_on()` before each op and transfer."""
    run: Callable[..., tuple[Any, ...]]
    """`run(progress, values, may_go_on)` empties `values`, returns the results, and notes changes in `progress`."""
    code: CodeType
    positions: Sequence[int]
    """For each line, the instruction that is next when it fails."""

    def stopped(self, trace: TracebackType | None) -> tuple[int, dict[fx.Node, Any]] | None:
        """Return where an error with this traceback stopped the function, and the values then.

        None if the function had not begun. The traceback keeps the function's frame, which has no values afterwards.
        """
        while trace is not None and trace.tb_frame.f_code is not self.code:
            trace = trace.tb_next
        if trace is None:
            return None
        position = self.positions[trace.tb_lineno - 1]
        # Names are given anew as they were when this was written.
        writer = _Writer(self.program, self.live)
        if self.first == 0:
            writer.forget(self.program.unused)
        for instruction in self.instructions[self.first : position]:
            writer.write(instruction, asks=self.asks)
        variables = trace.tb_frame.f_locals
        values = {node: variables[name] for node, name in writer.names.items()}
        if isinstance(variables, dict):  # before Python 3.13 a copy, which the frame keeps
            variables.clear()
        del variables
        trace.tb_frame.clear()
        return position, values


def generated(
    program: LineSource, instructions: Iterable[Line], first: int, live: Sequence[fx.Node], *, asks: bool
) -> Generated:
    """Return `instructions` of `program` from `first` on, as a function of the values of the nodes `live`."""
    kept = list(instructions)
    writer = _Writer(program, live)
    lines = ["def run(progress, values, may_go_on):", f"    [{', '.join(writer.names.values())}] = values"]
    lines.append("    values.clear()")
    positions = [first] * len(lines)
    if first == 0:
        lines += writer.forget(program.unused)
    positions += [first] * (len(lines) - len(positions))
    for position, instruction in enumerate(kept[first:], first):
        before, after = writer.write(instruction, asks=asks)
        lines += before + after
        positions += [position] * len(before) + [position + 1] * len(after)
    lines.append(f"    return ({''.join(writer.spelled(r) + ', ' for r in program.results)})")
    positions.append(len(kept))
    scope = writer.constants
    exec(compile("\n".join(lines), "<overspill step>", "exec"), scope)  # noqa: S102 - of what is written here
    run = scope["run"]
    return Generated(program, kept, first, live, asks, run, run.__code__, positions)


class _Writer:
    """Writes instructions as Python.

    `names` are the variables of the values that exist. `constants` are values without a variable.
    """

    def __init__(self, program: LineSource, live: Iterable[fx.Node]) -> None:
        self.constants: dict[str, Any] = {}
        self._constant_names: dict[int, str] = {}
        self._program = program
        self.names: dict[fx.Node, str] = {}
        self._free: list[str] = []
        for node in live:
            self._name(node)

    def write(self, instruction: Line, *, asks: bool) -> tuple[list[str], list[str]]:
        """Return the lines of an instruction: those up to the end of its call, and those after it."""
        node, target, args, kwargs, done_with, mutation = instruction
        before, after = [], []
        if asks and DOES in node.meta:
            before.append("    may_go_on()")
        if node.meta.get(DOES, ("",))[0] is Verb.RUN_ON_HOST:  # it only starts an update, which tells what it has done
            after.append("    progress.changed = True")
        elif mutation is not None:
            before.append(f"    progress.lost = {str(mutation)!r}")
            if mutation.op == UPDATE:
                before.append("    progress.changed = True")
            after.append("    progress.lost = ''")
        # A result's variable is no argument's: these live until the call is done.
        given = [*map(self.spelled, args), *(f"{key}={self.spelled(value)}" for key, value in kwargs.items())]
        call = f"{given[0]}[{given[1]}]" if target is getitem else f"{self._constant(target)}({', '.join(given)})"
        before.append(f"    {self._name(node)} = {call}")
        return before, after + self.forget(done_with)

    def forget(self, nodes: Sequence[fx.Node]) -> list[str]:
        """Return the line that deletes the values of these nodes."""
        names = [self.names.pop(node) for node in nodes]
        self._free += names
        return [f"    del {', '.join(names)}"] if names else []

    def spelled(self, value: Any) -> str:
        """Return an argument or result as Python text."""
        if isinstance(value, fx.Node):
            return self.names[value] if value in self.names else self._constant(self._program.constants[value])
        if type(value) in _LITERALS:
            return repr(value)
        if not _holds_node(value):
            return self._constant(value)
        if isinstance(value, slice):
            return f"slice({self.spelled(value.start)}, {self.spelled(value.stop)}, {self.spelled(value.step)})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self.spelled(v)}' for key, v in value.items())}}}"
        parts = ", ".join(map(self.spelled, value))
        return f"[{parts}]" if isinstance(value, list) else f"({parts},)"

    def _name(self, node: fx.Node) -> str:
        self.names[node] = self._free.pop() if self._free else f"v{len(self.names)}"
        return self.names[node]

    def _constant(self, value: Any) -> str:
        name = self._constant_names.setdefault(id(value), f"c{len(self._constant_names)}")
        self.constants[name] = value
        return name


def _holds_node(argument: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return bool(found)
