"""Lowered programs that tell a recorder what they do: each instruction is wrapped, and nothing of the graph itself changes.

A program is made to tell when it first runs in a recording, whenever it was lowered, and the plain one is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from overspill.core import Graph
from overspill.runtime.driver import LoweredProgram, ProgramRun
from overspill.runtime.lower import DOES, TOGETHER

from .record import Label
from .recorder import Recorder


class Told:
    """Calls `target`, which does what `label` says, between telling that it begins and that it ends."""

    def __init__(self, target: Callable[..., Any], label: Label, recorder: Recorder) -> None:
        self._target = target
        self._label = label
        self._recorder = recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the target returns."""
        recorder = self._recorder
        recorder.begin(self._label)
        try:
            made = self._target(*args, **kwargs)
        except BaseException:
            recorder.forget()
            raise
        recorder.end(made)
        return made


def label_of(node: fx.Node, graph: Graph) -> Label | None:
    """What a node of a lowered graph does for its plan; None for what is no instruction of a schedule."""
    if node.op != "call_function" or (does := node.meta.get(DOES)) is None:
        return None  # an input too may have the meta of what made it
    verb, target = does
    return Label(graph, verb, target, node.meta.get(TOGETHER, 0))


def told_instructions(program: LoweredProgram, graph: Graph, recorder: Recorder) -> list[Any]:
    """The instructions of a `program` for `graph`, one by one as they are, which tell `recorder`."""

    def wrap(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
        label = label_of(node, graph)
        return target if label is None else Told(target, label, recorder)

    return recorder.form_of(program, lambda: program.wrapped(wrap))


def run(program: LoweredProgram, graph: Graph, recorder: Recorder | None, args: list[Any]) -> tuple[Any, ...]:
    """Run a `program` for `graph` on `args`, which it takes out of the list, and tell `recorder` of it if there is one."""
    told = None
    if recorder is not None:
        recorder.given(graph, program.held, args)
        told = told_instructions(program, graph, recorder)
    return ProgramRun(program, args).go_on(instructions=told)
