"""Wrap the instructions of a lowered program to report to a recorder.

A program is wrapped when it first runs in a recording. The original program stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from overspill.core import Graph
from overspill.runtime.driver import Instructions, LoweredProgram, ProgramRun
from overspill.runtime.emitter import DOES, TOGETHER

from .record import Label
from .recorder import RunRecorder


class RecordedCall:
    """A call of `target` between the recorder's begin and end."""

    def __init__(self, target: Callable[..., Any], label: Label, recorder: RunRecorder) -> None:
        self._target = target
        self._label = label
        self._recorder = recorder

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the target between begin and end, and return its result."""
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
    """Return the label of a lowered node; None if it carries out no instruction."""
    if node.op != "call_function" or (does := node.meta.get(DOES)) is None:
        return None  # an input too may have the meta of what made it
    verb, target = does
    return Label(graph, verb, target, node.meta.get(TOGETHER, 0))


def instrumented(program: LoweredProgram, graph: Graph, recorder: RunRecorder) -> Instructions:
    """Return the instructions of `program`, wrapped to report to `recorder`."""

    def wrap(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
        label = label_of(node, graph)
        return target if label is None else RecordedCall(target, label, recorder)

    return recorder.form_of(program, lambda: program.wrapped(wrap))


def run(program: LoweredProgram, graph: Graph, recorder: RunRecorder | None, args: list[Any]) -> tuple[Any, ...]:
    """Run `program` on `args`, emptying the list, and report to `recorder` if any."""
    told = None
    if recorder is not None:
        recorder.given(graph, program.held, args)
        told = instrumented(program, graph, recorder)
    return ProgramRun(program, args).go_on(instructions=told)
