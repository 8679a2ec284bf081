"""Make a joint graph whose nodes are the calls of Inductor's programs.

In this form every step is planned and lowered. The nodes' values are the programs' own fake tensors; outputs have the
descriptors of the joint graph that Inductor made the programs from.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from overspill.capture.compiled.checks import Check
from overspill.capture.compiled.joint import BACKWARD_TAGS, NO_VERSION_CHECK, JointGraph
from overspill.core.errors import UnsupportedError

from .functions import Functions, ProgramFunction
from .storages import Call, Storages

aten = torch.ops.aten
IN_BACKWARD = {"partitioner_tag": BACKWARD_TAGS[0]}


def joint_of_call(programs: Storages, traced: JointGraph, unchecked: int = 0) -> JointOfPrograms:
    """Return the joint graph for autograd: backward takes the gradients of the results.

    Autograd does not check the last `unchecked` saved tensors for in-place changes.
    """
    return _Nodes(programs, traced).call(unchecked)


def joint_of_step(programs: Storages, traced: JointGraph, share: int, checks: Sequence[Check] = ()) -> JointOfPrograms:
    """Return the joint graph of a step that backpropagates its loss divided by `share`.

    `checks` check its last results. Raises UnsupportedError.
    """
    return _Nodes(programs, traced).step(share, checks)


class JointOfPrograms(JointGraph):
    """A joint graph with the programs' own split: all calls stay, in their order."""

    def _split(self) -> None:
        body = [n for n in self.module.graph.nodes if n.op == "call_function"]
        self.forward = [n for n in body if n.meta.get("partitioner_tag") not in BACKWARD_TAGS]
        self.backward = [n for n in body if n.meta.get("partitioner_tag") in BACKWARD_TAGS]
        self.backward_set = frozenset(self.backward)

    def _snapshot_mutated_inputs(self) -> bool:
        """Return False: backward reads the tensors that forward saves for it, as under `torch.compile`."""
        return False


class _Nodes:
    """Builds the joint graph of calls; `nodes` are those of root variables."""

    def __init__(self, programs: Storages, traced: JointGraph) -> None:
        self.programs = programs
        self.traced = traced
        self.graph = fx.Graph()
        self.nodes: dict[str, fx.Node] = {}
        self.functions = Functions(programs)

    def call(self, unchecked: int) -> JointOfPrograms:
        """Return the joint graph for autograd: backward is given the gradients of the results."""
        programs, traced = self.programs, self.traced
        tangents = [] if programs.backward is None else programs.backward.inputs[len(programs.saved) :]
        self._take_inputs()
        for variable, tangent in zip(tangents, traced.tangents, strict=True):
            self._input(variable, tangent)
        outputs = self._forward() + self._backward()
        self._let_change(programs.saved[len(programs.saved) - unchecked :])
        return self._made(outputs, programs.num_forward_outputs)

    def step(self, share: int, checks: Sequence[Check]) -> JointOfPrograms:
        """Return the joint graph of a step that starts backward itself. Raises UnsupportedError."""
        programs, traced = self.programs, self.traced
        backward = programs.backward
        if backward is None or len(tangents := backward.inputs[len(programs.saved) :]) != 1:
            raise UnsupportedError(
                'the step has no gradient of its loss alone to begin backward with; use backend="eager"'
            )
        if len(backward.outputs) != len(traced.backward_outputs):
            raise UnsupportedError(
                f"Inductor's backward returns {len(backward.outputs)} gradients, not {len(traced.backward_outputs)}; "
                'use backend="eager"'
            )
        # Backward's seed is made where forward ends, from the loss.
        self._take_inputs()
        outputs = self._forward()
        place = next(i for i, d in enumerate(traced.forward_descs) if type(d).__name__ == "PlainAOTOutput")
        outputs[place] = self._seed(outputs[place], tangents[0], share)
        # What is checked is checked before backward, and no result.
        own = len(outputs) - len(checks)
        for check, value in zip(checks, outputs[own:], strict=True):
            self._node(check.check_value, (value,), None, {})
        return self._made(outputs[:own] + self._backward(), own)

    def _take_inputs(self) -> None:
        for variable, primal in zip(self.programs.forward.inputs, self.traced.primals, strict=True):
            self._input(variable, primal)

    def _input(self, variable: str, source: fx.Node) -> None:
        node = self.nodes[variable] = self.graph.placeholder(str(source.target))
        node.meta = {"val": self.programs.values[variable], "desc": source.meta.get("desc")}

    def _forward(self) -> list[Any]:
        for call in self.programs.calls[0]:
            self._call(call, {})
        own = self.programs.num_forward_outputs  # behind them is what is saved
        return self._outputs(self.programs.forward.outputs[:own], self.programs.outputs[0][:own], {})

    def _backward(self) -> list[Any]:
        if self.programs.backward is None:
            return []
        for call in self.programs.calls[1]:
            self._call(call, IN_BACKWARD)
        return self._outputs(self.programs.backward.outputs, self.programs.outputs[1], IN_BACKWARD)

    def _let_change(self, saved: Sequence[ast.expr]) -> None:
        """Exempt these `saved` tensors, which others may change in place, from autograd's check."""
        programs = self.programs
        keys = {programs.key_of(name) for expression in saved for name in programs.forward.uses_of(expression)}
        for root in {root for key in keys if key is not None for root in programs.roots[key]} & self.nodes.keys():
            self.nodes[root].meta[NO_VERSION_CHECK] = True

    def _made(self, outputs: list[Any], forward: int) -> JointOfPrograms:
        """Return the joint graph of `outputs`, the first `forward` of which are forward's."""
        traced = self.traced
        self.graph.output(tuple(outputs)).meta["desc"] = (*traced.forward_descs[:forward], *traced.backward_descs)
        return JointOfPrograms(fx.GraphModule(torch.nn.Module(), self.graph), forward)

    def _seed(self, loss: fx.Node, tangent: str, share: int) -> fx.Node:
        """Return the returned loss; add the gradient from which backward starts, as autograd would."""
        value = self.programs.values[tangent]
        seed = self._node(aten.ones_like.default, (loss,), value, IN_BACKWARD)
        if share > 1:
            with value.fake_mode:
                divided, value = loss.meta["val"] / share, value.clone()
            seed.meta["val"] = value
            loss = self._node(aten.div.Tensor, (loss, share), divided, {})
            seed = self._node(aten.div.Tensor, (seed, share), self.programs.values[tangent], IN_BACKWARD)
        self.nodes[tangent] = seed
        return loss

    def _call(self, call: Call, meta: dict[str, Any]) -> None:
        function = self.functions.of_call(call)
        values = tuple(self.programs.values[name] for name in function.makes)
        alone = len(values) == 1 and not function.updates
        node = self._node(function, self._args(function), values[0] if alone else values or None, meta)
        for i, (name, value) in enumerate(zip(function.makes, values, strict=True)):
            self.nodes[name] = node if alone else self._node(operator.getitem, (node, i), value, meta)

    def _outputs(self, expressions: Sequence[ast.expr], values: Sequence[Any], meta: dict[str, Any]) -> list[Any]:
        return [self._output(e, value, meta) for e, value in zip(expressions, values, strict=True)]

    def _output(self, expression: ast.expr, value: Any, meta: dict[str, Any]) -> fx.Node | None:
        """Return the node of an output, a view if need be; None without output."""
        if isinstance(expression, ast.Constant) and expression.value is None:
            return None
        if isinstance(expression, ast.Name) and expression.id in self.nodes:
            return self.nodes[expression.id]
        function = self.functions.of_expression(expression)
        return self._node(function, self._args(function), value, meta)

    def _args(self, function: ProgramFunction) -> tuple[fx.Node, ...]:
        return tuple(self.nodes[name] for name in function.takes)

    def _node(self, target: Any, args: tuple[Any, ...], value: Any, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta = {"val": value, **meta}
        return node
