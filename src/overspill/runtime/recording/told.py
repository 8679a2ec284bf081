"""Lowered graphs that tell a recorder what they do: each instruction is wrapped, and nothing of the graph itself changes.

A graph is made to tell when it first runs in a recording, whenever it was lowered, and the plain one is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx
from torch.fx.graph import _BoxedCodeGen

from overspill.capture.compiled.joint import copied
from overspill.core import Graph
from overspill.runtime.lower import DOES, HOLDS, TOGETHER

from .record import Label
from .recorder import Recorder


class Told:
    """Calls `target`, which does what `label` says, between telling that it begins and that it ends. FX reads its name."""

    def __init__(self, target: Callable[..., Any], label: Label, recorder: Recorder) -> None:
        self.__name__ = str(getattr(target, "__name__", "op"))
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


def held_by(nodes: Sequence[fx.Node]) -> list[int | None]:
    """For each input of a lowered graph the tensor that it is."""
    return [node.meta.get(HOLDS) for node in nodes]


def told_module(module: fx.GraphModule, graph: Graph, recorder: Recorder) -> Callable[[list[Any]], Any]:
    """What runs in place of a lowered `module` of `graph`, which takes its arguments in a list, and tells `recorder`."""

    def made() -> Callable[[list[Any]], Any]:
        telling = copied(module)
        for node in telling.graph.nodes:
            if (label := label_of(node, graph)) is not None:
                node.target = Told(node.target, label, recorder)
        telling.graph.set_codegen(_BoxedCodeGen())
        telling.recompile()
        tensors = held_by(telling.graph.find_nodes(op="placeholder"))

        def run(args: list[Any]) -> Any:
            recorder.given(graph, tensors, args)
            return telling.forward(args)

        return run

    return recorder.form_of(module, made)


class Program(Protocol):
    """What is used of a whole step's program."""

    inputs: list[fx.Node]

    def wrapped(self, wrap: Callable[[fx.Node, Callable[..., Any]], Callable[..., Any]]) -> list[Any]:
        """Its instructions, with what each calls as `wrap` has it."""


def told_instructions(program: Program, graph: Graph, recorder: Recorder) -> list[Any]:
    """The instructions of a whole step's `program` for `graph`, one by one as they are, which tell `recorder`."""

    def wrap(node: fx.Node, target: Callable[..., Any]) -> Callable[..., Any]:
        label = label_of(node, graph)
        return target if label is None else Told(target, label, recorder)

    return recorder.form_of(program, lambda: program.wrapped(wrap))
