"""The whole step around Inductor's programs as one Graph: their calls are its forward and backward.

What `capture/compiled/whole_step.py` does with the ops of a joint graph is done here with calls of programs: a graph is
made whose nodes are these calls, and whose values are the programs' own fake tensors. The updates of parameters, the
schedule and what runs it are then those of every other step.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.capture.compiled.graph import InputInfo, Surroundings
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.whole_step import CapturedStep, CaptureOfWholeStep, GradientOps, around_step
from overspill.core import Phase, TensorKind
from overspill.core.errors import UnsupportedError

from .functions import Function, Functions
from .graph import CallsOfPrograms
from .storages import Call, Storages

aten = torch.ops.aten
_BACKWARD = "is_backward"


def capture_step_of_programs(
    programs: Storages,
    traced: JointGraph,
    inputs: Sequence[InputInfo],
    ops: GradientOps,
    share: int = 1,
    name: str = "step",
    elsewhere: tuple[tuple[TensorKind, int], ...] = (),
) -> CapturedStep:
    """The Graph of one training step around `programs`, which Inductor made from the joint graph `traced`.

    The loss is divided by `share`, behind the programs, as a loop over as many micro-batches does it. The rest is as for
    `capture_step`. Raises UnsupportedError.
    """
    joint = _Nodes(programs, traced, share).joint()
    around = around_step([node.meta["val"] for node in traced.primals], elsewhere)
    return _CaptureOfStep(programs, traced, joint, list(inputs), ops, name, around).build()


class JointOfPrograms(JointGraph):
    """Forward and backward as the programs have them: each call where it stands, whoever reads what it makes."""

    def _split(self) -> None:
        body = [n for n in self.module.graph.nodes if n.op == "call_function"]
        self.forward = [n for n in body if n.meta.get("partitioner_tag") != _BACKWARD]
        self.backward = [n for n in body if n.meta.get("partitioner_tag") == _BACKWARD]
        self.backward_set = frozenset(self.backward)

    def _snapshot_mutated_inputs(self) -> bool:
        """Backward reads what forward hands to it, as under `torch.compile`."""
        return False


class _Nodes:
    """Makes the graph of calls. `nodes` are those of variables that are roots."""

    def __init__(self, programs: Storages, traced: JointGraph, share: int) -> None:
        self.programs = programs
        self.traced = traced
        self.share = share
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.functions = Functions(programs)
        values = (n.meta["val"] for n in traced.primals)
        self.mode: FakeTensorMode = next(v.fake_mode for v in values if isinstance(v, Tensor))

    def joint(self) -> JointOfPrograms:
        programs, traced = self.programs, self.traced
        forward, backward = programs.forward, programs.backward
        if backward is None or len(tangents := backward.inputs[len(programs.saved) :]) != 1:
            raise UnsupportedError(
                'the step has no gradient of its loss alone to begin backward with; use backend="eager"'
            )
        if len(backward.outputs) != len(traced.backward_outputs):
            raise UnsupportedError(
                f"Inductor's backward returns {len(backward.outputs)} gradients, not {len(traced.backward_outputs)}; "
                'use backend="eager"'
            )
        for variable, primal in zip(forward.inputs, traced.primals, strict=True):
            node = self.nodes[variable] = self.graph.placeholder(primal.name)
            node.meta = {"val": programs.values[variable], "desc": primal.meta["desc"]}
        for call in programs.calls[0]:
            self._call(call, {})
        outputs: list[Any] = [self._output(e, {}) for e in forward.outputs[: programs.num_forward_outputs]]
        place = next(i for i, d in enumerate(traced.forward_descs) if type(d).__name__ == "PlainAOTOutput")
        outputs[place] = self._seed(outputs[place], tangents[0])
        tag = {"partitioner_tag": _BACKWARD}
        for call in programs.calls[1]:
            self._call(call, tag)
        outputs += [self._output(e, tag) for e in backward.outputs]
        self.graph.output(tuple(outputs)).meta["desc"] = (*traced.forward_descs, *traced.backward_descs)
        self.functions.compiled()
        return JointOfPrograms(fx.GraphModule(torch.nn.Module(), self.graph), programs.num_forward_outputs)

    def _seed(self, loss: fx.Node, tangent: str) -> fx.Node:
        """The loss that is returned, and what backward begins with, as autograd makes it outside of the programs."""
        value = self.programs.values[tangent]
        seed = self._node(aten.ones_like.default, (loss,), value, {"partitioner_tag": _BACKWARD})
        if self.share > 1:
            with self.mode:
                divided, value = loss.meta["val"] / self.share, value.clone()
            seed.meta["val"] = value
            loss = self._node(aten.div.Tensor, (loss, self.share), divided, {})
            seed = self._node(
                aten.div.Tensor, (seed, self.share), self.programs.values[tangent], {"partitioner_tag": _BACKWARD}
            )
        self.nodes[tangent] = seed
        return loss

    def _call(self, call: Call, meta: dict[str, Any]) -> None:
        function = self.functions.of_call(call)
        values = tuple(self.programs.values[name] for name in function.makes)
        alone = len(values) == 1 and not function.updates
        node = self._node(function, self._args(function), values[0] if alone else values or None, meta)
        for i, (name, value) in enumerate(zip(function.makes, values, strict=True)):
            self.nodes[name] = node if alone else self._node(operator.getitem, (node, i), value, meta)

    def _output(self, expression: ast.expr, meta: dict[str, Any]) -> fx.Node | None:
        """The node of an output, a view where it is not all of a variable; None where the program returns none."""
        if isinstance(expression, ast.Constant) and expression.value is None:
            return None
        if isinstance(expression, ast.Name) and expression.id in self.nodes:
            return self.nodes[expression.id]
        function = self.functions.of_expression(expression)
        return self._node(function, self._args(function), self._value(expression), meta)

    def _value(self, expression: ast.expr) -> Any:
        programs = self.programs
        for part in zip((programs.forward, programs.backward), programs.outputs, strict=True):
            program, values = part
            if program is not None:
                for known, value in zip(program.outputs, values, strict=True):
                    if known is expression:
                        return value
        raise AssertionError

    def _args(self, function: Function) -> tuple[fx.Node, ...]:
        return tuple(self.nodes[name] for name in function.takes)

    def _node(self, target: Any, args: tuple[Any, ...], value: Any, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, **meta}
        return node


class _CaptureOfStep(CallsOfPrograms, CaptureOfWholeStep):
    def __init__(
        self,
        programs: Storages,
        traced: JointGraph,
        joint: JointGraph,
        inputs: list[InputInfo],
        ops: GradientOps,
        name: str,
        surroundings: Surroundings,
    ) -> None:
        CaptureOfWholeStep.__init__(self, joint, inputs, ops, name, surroundings)
        self.take(programs, traced)

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        call = node.target.call if isinstance(node.target, Function) else None
        if call is None:
            super()._add_node(node, phase)
            return
        self.nodes[len(self.ops)] = node
        self._add_call(call, phase)
