"""Run lowered graphs instruction by instruction, dropping each value at its last use.

The driver serves compiled models and whole steps, by a function that `generated.py` writes. A run stopped by an error
holds every tensor that it had. It can go on from the instruction that failed, which is then run again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from enum import Enum
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.compiled.gathers import StartCollective
from overspill.capture.compiled.whole_step import MUTATION
from overspill.core.errors import OverspillError
from overspill.runtime.emitter import HANDLE_PREFIX, HOLDS
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.host_lane import stopped_update
from overspill.runtime.transfer.ops import await_offload, await_prefetch, offload, prefetch

from .generated import Generated, Line, generated

aten = torch.ops.aten
DIRECT: dict[Any, Callable[..., Any]] = {
    aten.view.default: Tensor.view, aten.t.default: torch.t, aten.transpose.int: torch.transpose,
    aten.permute.default: torch.permute, aten.expand.default: Tensor.expand, aten.unsqueeze.default: torch.unsqueeze,
    aten.squeeze.dim: torch.squeeze, aten.select.int: torch.select, aten.as_strided.default: torch.as_strided,
    aten.mm.default: torch.mm, aten.addmm.default: torch.addmm, aten.bmm.default: torch.bmm,
    aten.cat.default: torch.cat,
    aten.add.Tensor: torch.add, aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum, aten.native_layer_norm.default: torch.native_layer_norm,
    aten.tanh.default: torch.tanh,
    aten.native_dropout.default: torch.native_dropout, aten.relu.default: torch.relu, aten.clone.default: torch.clone,
}  # fmt: skip
"""PyTorch's own bindings of ops: they call the same overload at half the host time."""
OF_TENSORS = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})
"""Ops whose binding may choose another overload for a number."""
TRANSFERS = (offload, await_offload, prefetch, await_prefetch)


class Form(Enum):
    """The form in which the run holds one of its inputs."""

    TENSOR = "tensor"
    HANDLE = "handle"
    ARRIVING = "arriving"


class Instructions(list[Line]):
    """Instructions, and the last function written to carry out all of them."""

    def __init__(self, each: Iterable[Line]) -> None:
        super().__init__(each)
        self._generated: Generated | None = None

    def function(self, program: LoweredProgram, *, asks: bool) -> Generated:
        """Return the function that carries out all instructions as they are now."""
        found = self._generated
        if found is None or found.asks != asks or found.instructions != self:
            found = self._generated = generated(program, self, 0, program.inputs, asks=asks)
        return found


class LoweredProgram:
    """The instructions of one lowered graph, with the last use of each value."""

    def __init__(self, module: fx.GraphModule) -> None:
        nodes = list(module.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.held: list[int | None] = [node.meta.get(HOLDS) for node in self.inputs]
        """The graph's tensor that each input is, or None."""
        self.constants = {n: operator.attrgetter(str(n.target))(module) for n in nodes if n.op == "get_attr"}
        self.results: Sequence[Any] = nodes[-1].args[0]
        # Each value dies with its last user; a value without one, at once.
        last_user = {source: user for user in nodes for source in user.all_input_nodes}
        self.unused = [node for node in self.inputs if node not in last_user]
        done_with: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            if node.op != "get_attr":  # constants stay
                done_with.setdefault(last_user.get(node, node), []).append(node)
        # One instruction for each call.
        self.instructions = Instructions(
            Line(n, _called(n), n.args, dict(n.kwargs), tuple(done_with.get(n, ())), n.meta.get(MUTATION))
            for n in nodes
            if callable(n.target)
        )

    def wrapped(self, wrap: Callable[[fx.Node, Callable[..., Any]], Callable[..., Any]]) -> Instructions:
        """Return the instructions, with each target replaced by the result of `wrap`."""
        return Instructions(i._replace(target=wrap(i.node, i.target)) for i in self.instructions)

    @cached_property
    def forms(self) -> dict[fx.Node, list[tuple[fx.Node, Form]]]:
        """For each input, the instructions whose value is that input in some form, in order."""
        forms: dict[fx.Node, list[tuple[fx.Node, Form]]] = {node: [] for node in self.inputs}
        named = {
            node.name: node for node in self.inputs
        }  # the handle of what is there too is that input in another form
        source = {node: named.get(node.name.removeprefix(HANDLE_PREFIX), node) for node in self.inputs}
        for node in self.inputs:
            form_now = Form.HANDLE if node.name.startswith(HANDLE_PREFIX) else Form.TENSOR
            forms[source[node]].append((node, form_now))
        # Follow each input through the transfers.
        form = {offload: Form.HANDLE, prefetch: Form.ARRIVING, await_prefetch: Form.TENSOR}
        for instruction in self.instructions:
            node = instruction.node
            if node.target in form and node.args[0] in source:
                source[node] = source[node.args[0]]
                forms[source[node]].append((node, form[node.target]))
        return forms


class ProgramRun:
    """A run of `program` on `args`, which it takes out of the caller's list."""

    def __init__(self, program: LoweredProgram, args: list[Any]) -> None:
        self.program = program
        self._live: Sequence[fx.Node] = program.inputs
        self._values = list(args)
        args.clear()
        self.position = 0
        self.changed = False
        """Whether a parameter has been updated."""
        self.lost = ""
        """The action that an error stopped half-way and that cannot be repeated."""

    def go_on(
        self, may_go_on: Callable[[], None] | None = None, instructions: Instructions | None = None
    ) -> tuple[Any, ...]:
        """Run the remaining instructions, and return the results.

        `instructions` replace the program's own. `may_go_on`, if given, is called before each op and transfer, and may
        raise. After an error, call this again: it begins with the instruction that raised.
        """
        each = self.program.instructions if instructions is None else instructions
        asks = may_go_on is not None
        if self.position == 0:
            function = each.function(self.program, asks=asks)
        else:
            function = generated(self.program, each, self.position, self._live, asks=asks)
        try:
            return function.run(self, self._values, may_go_on)
        except BaseException as error:
            if (found := function.stopped(error.__traceback__)) is not None:
                self.position, values = found
                self._live, self._values = list(values), list(values.values())
            if self.changed and (stopped := stopped_update(error)) is not None:  # else it is of the step before
                self.lost = f"the update of {stopped}"
            raise

    def where(self) -> tuple[int | None, str]:
        """Return the tensor that the next instruction moves, as the position of an input or as a name.

        A position comes with an empty name, a name with None.
        """
        if self.position == len(self.program.instructions):
            return None, ""
        node = self.program.instructions[self.position].node
        names = {n: i for i, source in enumerate(self.program.inputs) for n, _ in self.program.forms[source]}
        moved = node if node.target is await_prefetch else node.args[0]
        return (names.get(moved), node.name) if node.target in TRANSFERS else (None, "")

    def op(self) -> str:
        """Return the name of the next op."""
        return str(self.program.instructions[self.position].node.target)

    def give_up(self, wanted: Iterable[int], engine: TransferEngine | None) -> dict[int, tuple[Form, Any]]:
        """Return the `wanted` inputs as they are now, as tensors or handles.

        Transfers are cancelled, and running collectives are awaited. An input that is being prefetched is returned as a
        handle of its copy in the store.
        """
        values = dict(zip(self._live, self._values, strict=True))
        self._values.clear()
        found = {position: self._now(self.program.inputs[position], values, engine) for position in wanted}
        for node, value in values.items():
            if node.target is prefetch and engine is not None:
                engine.cancel(value)
            elif isinstance(node.target, StartCollective):
                with suppress(OverspillError):  # the run has its own error
                    value()
        return found

    def _now(self, node: fx.Node, values: dict[fx.Node, Any], engine: TransferEngine | None) -> tuple[Form, Any]:
        live = [(form, values[n]) for n, form in reversed(self.program.forms[node]) if n in values]
        for wanted in (Form.TENSOR, Form.HANDLE):  # a tensor is what a handle is, or newer
            for form, value in live:
                if form is wanted:
                    return form, value
        ((_, arriving),) = live
        assert engine is not None
        handle = engine.sent_back(arriving)
        return Form.HANDLE, handle


def _called(node: fx.Node) -> Any:
    if node.target in OF_TENSORS and not all(isinstance(a, fx.Node) for a in node.args):
        return node.target
    return DIRECT.get(node.target, node.target)
