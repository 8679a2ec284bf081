"""Memory of a step in MXNet's executor: every array, every planned storage, and the temporary space.

`simple_bind` allocates arguments, states and gradients; the optimizer's states come with the first update. A storage of
the plan is allocated when it is first written, and stays. One temporary space serves all operators. It is allocated
again when an operator requests more (`src/resource.cc`, MXNET_GPU_TEMP_COPY=1).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from overspill.capture.recording.ledger import Ledger
from overspill.capture.recording.recording import RecordedOp, Recording
from overspill.core import Device, Phase, TensorKind
from overspill.core.errors import RequestError
from overspill.costs import Sizes, fastest_workspace_bytes
from overspill.costs.scratch import Scratch

from .backward import HEAD_GRADIENT, MxnetStep, training_step
from .memory_plan import ITEM_BYTES, MemoryPlan
from .operators import is_operator
from .shapes import Shape
from .symbol import Node, NodeOutput, Symbol

WORKSPACE_MIB = 1024
"""The attribute `workspace` of Convolution, where a symbol does not set it; operators are tuned within it."""
STATES = {"sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adam": 2, "adamw": 2}
"""How many arrays of a weight's size each optimizer keeps (`python/mxnet/optimizer/optimizer.py`)."""


def record(symbol: Symbol, inputs: dict[str, Shape], device: Device, *, optimizer: str | None = "sgd") -> Recording:
    """Return the recording of a training step of `symbol` on `inputs` and `device`, as MXNet runs it.

    Without an optimizer it is the forward alone. Raises RequestError for inputs and optimizers that do not exist,
    UnsupportedError for unknown operators.
    """
    missing = [name for name in inputs if name not in symbol.variables]
    if missing:
        raise RequestError(f"the symbol has no input {missing[0]!r}; its variables: {_listed(symbol.variables)}")
    if optimizer is not None and optimizer not in STATES:
        raise RequestError(f"MXNet's {optimizer} is not known here; optimizers: {', '.join(STATES)}")
    step = training_step(symbol, inputs, trains=optimizer is not None)
    return _SymbolExecutor(step, inputs, device).run(0 if optimizer is None else STATES[optimizer])


class _SymbolExecutor:
    """Records the allocations of a step in a ledger, in order."""

    def __init__(self, step: MxnetStep, inputs: Mapping[str, Shape], device: Device) -> None:
        self.step, self.device = step, device
        self.plan = MemoryPlan(step)
        self._inputs = inputs
        self._ledger = Ledger()
        self._arrays: dict[NodeOutput, int] = {}
        self._storages: dict[int, int] = {}
        self._temporary: int | None = None
        self._parameters = 0

    def run(self, states: int) -> Recording:
        """Record bind, forward, backward, and the update with `states` arrays a weight."""
        self._bind()
        start = self._ledger.events
        for i, node in enumerate(self.step.nodes):
            if not node.is_variable:
                self._execute(i, node)
        self._update(states)
        return self._ledger.recording((start,), self._parameters)

    def _bind(self) -> None:
        read = {entry for node in self.step.nodes for entry in node.inputs}
        for i, node in enumerate(self.step.nodes):
            entry = NodeOutput(i, 0)
            if node.is_variable and (node.name != HEAD_GRADIENT or entry in read):
                self._arrays[entry] = self._allocate(self._bytes(entry), self._kind(node), node.name, Phase.FORWARD)
        for name, entry in self.step.gradients.items():
            self._arrays[entry] = self._allocate(
                self._bytes(entry), TensorKind.GRADIENT, f"grad of {name}", Phase.FORWARD
            )
            self._parameters += self._bytes(entry) // ITEM_BYTES

    def _kind(self, node: Node) -> TensorKind:
        if node.name in self._inputs:
            return TensorKind.INPUT
        if node.name in self.step.auxiliary:
            return TensorKind.BUFFER
        return TensorKind.OUTPUT_GRADIENT if node.name == HEAD_GRADIENT else TensorKind.PARAMETER

    def _execute(self, i: int, node: Node) -> None:
        phase = Phase.FORWARD if i < self.step.forward_count else Phase.BACKWARD
        forward = self.step.forward[i]
        layer = self.step.nodes[i if forward is None else forward].name
        reads = tuple(dict.fromkeys(self._place(entry, phase, layer) for entry in node.inputs))
        writes = tuple(
            dict.fromkeys(self._place(NodeOutput(i, k), phase, layer) for k in range(len(self.step.shapes[i])))
        )
        self._take_space(self._space_bytes(i), layer, phase)
        if phase is Phase.FORWARD and self.step.trains:
            self._reserve(i, layer)
        self._ledger.add(RecordedOp(node.op, layer, phase, 0, reads, writes))

    def _place(self, entry: NodeOutput, phase: Phase, layer: str) -> int:
        """Return the allocation of `entry`. Its storage is allocated now if it was empty before."""
        if entry in self._arrays:
            return self._arrays[entry]
        storage = self.plan.storage[entry]
        if storage not in self._storages:
            kind = TensorKind.ACTIVATION if phase is Phase.FORWARD else TensorKind.OUTPUT_GRADIENT
            name = self.step.nodes[entry.node].name
            self._storages[storage] = self._allocate(self.plan.nbytes[storage], kind, name, phase, layer)
        return self._storages[storage]

    def _reserve(self, i: int, layer: str) -> None:
        """Allocate what the operator of node `i` keeps from its first run on."""
        node, operator = self.step.nodes[i], self.step.of[i]
        shapes = [self.step.shapes[entry.node][entry.number] for entry in node.inputs]
        nbytes = 0 if operator is None else operator.reserve(node, shapes)
        if nbytes:
            self._allocate(nbytes, TensorKind.ACTIVATION, f"reserve of {node.name}", Phase.FORWARD, layer)

    def _take_space(self, nbytes: int, layer: str, phase: Phase) -> None:
        """Use `nbytes` of temporary space.

        The last space serves if it is large enough. Otherwise it is freed and a new one allocated.
        """
        last = self._temporary
        if nbytes == 0 or (last is not None and self._ledger.allocations[last].nbytes >= nbytes):
            return
        if last is not None:
            self._ledger.end(last)
        self._temporary = self._allocate(nbytes, TensorKind.WORKSPACE, "temporary space", phase, layer)

    def _space_bytes(self, i: int) -> int:
        node, forward, operator = self.step.nodes[i], self.step.forward[i], self.step.of[i]
        layer = i if forward is None else forward
        if operator is None:
            return 0
        if is_operator(self.step.nodes[layer], "Convolution", "Deconvolution"):
            return self._workspace_bytes(layer)
        read = self.step.nodes[layer].inputs
        shapes = [self.step.shapes[entry.node][entry.number] for entry in read]
        return 0 if node is self.step.nodes[layer] else operator.backward_space(shapes)

    def _workspace_bytes(self, layer: int) -> int:
        """Return the workspace bytes of the fastest algorithm within the operator's limit.

        Forward and backward are tuned alike.
        """
        node = self.step.nodes[layer]
        data, weight = (self.step.shapes[entry.node][entry.number] for entry in node.inputs[:2])
        made = self.step.shapes[layer][0]
        if is_operator(node, "Deconvolution"):  # it runs as the gradient of a convolution
            data, made = made, data
        sizes = Sizes(
            data[0], data[1], made[1], data[2:], made[2:], weight[2:], node.number("num_group", 1), ITEM_BYTES, 1
        )
        return fastest_workspace_bytes(sizes, self.device, node.number("workspace", WORKSPACE_MIB) << 20)

    def _update(self, states: int) -> None:
        by_name = {self.step.nodes[entry.node].name: array for entry, array in self._arrays.items()}
        for name, entry in self.step.gradients.items():
            weight = by_name[name]
            kept = tuple(
                self._allocate(self._bytes(entry), TensorKind.OPTIMIZER_STATE, f"state of {name}", Phase.UPDATE)
                for _ in range(states)
            )
            self._ledger.add(
                RecordedOp("update", name, Phase.UPDATE, 0, (weight, self._arrays[entry], *kept), (weight, *kept))
            )

    def _allocate(self, nbytes: int, kind: TensorKind, name: str, phase: Phase, layer: str = "") -> int:
        scratch = Scratch("bytes", (nbytes,), "float32") if kind is TensorKind.WORKSPACE else None
        return self._ledger.allocate(nbytes, kind, name, phase, layer, scratch)

    def _bytes(self, entry: NodeOutput) -> int:
        return ITEM_BYTES * prod(self.step.shapes[entry.node][entry.number])


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
