"""Turn AOTAutograd's joint graph into the Graph of one training step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from overspill.capture.flops import flops_of_call, has_formula, moved_bytes
from overspill.capture.layers import LayerNames, op_name
from overspill.capture.programs.checkpoints import checkpoint_of
from overspill.core import Graph, LayerType, Op, Phase, Tensor, TensorKind
from overspill.pytorch.decompositions import is_dense
from overspill.pytorch.schemas import node_argument
from overspill.pytorch.storages import storage_key
from overspill.pytorch.trees import tree_leaves

from .batch_norm import recomputes_without_statistics, results_without_statistics
from .joint import (
    JointGraph,
    StorageKey,
    has_fakes,
    input_of,
    is_random,
    is_repeatable,
    mutated_args,
    storage_bytes,
    storages,
)  # fmt: skip
from .lines import NodeLines
from .result_memory import into_memory
from .scratch import AS_LARGE_AS_INPUT, measure, scratch_of

GUARDS, PENDING, PREVIOUS, RETURN, REST, TANGENTS, WRITE_BACK, GRADIENTS, CLIP, UPDATE = (
    "step.guards", "step.pending", "step.previous", "step.return", "step.rest", "step.tangents", "step.write_back",
    "step.gradients", "step.clip", "step.update",
)  # fmt: skip
"""Ops of the step outside of the captured graph: autograd's, the caller's and the optimizer's."""

RANDOM_STATE = "random state"
"""The random generator, as a tensor of no bytes that each random op updates."""

CLONES_STORAGE = frozenset({"copy", "slice_scatter", "select_scatter", "diagonal_scatter", "as_strided_scatter"})
"""Ops that clone all of the storage of their first argument, whatever view of it that is."""

TANGENTS_ARE_GIVEN = hasattr(torch.autograd.Function, "boxed_grads_call")
"""Whether backward may free its incoming gradients; older releases (2.11, say) hold them until it ends."""

HANDLE_BYTES = 8
"""Bytes that the runtime leaves in place of an offloaded tensor: its slot in the store, one int64."""
HANDLES = "transfer handles"
"""The name of the tensor that stands for them."""


@dataclass(frozen=True)
class InputInfo:
    """One input of the step."""

    kind: TensorKind
    name: str
    """A name for people, such as the parameter's path."""
    movable: bool = False
    """Whether it may be offloaded."""


@dataclass(frozen=True)
class Surroundings:
    """Bytes on the device during a step, outside of one captured graph."""

    optimizer_state_bytes: int = 0
    update_bytes: int = 0
    """The optimizer's temporaries."""
    update_moved_bytes: int = 0
    """What the optimizer's step reads and writes; 0: nobody knows."""
    reserved_bytes: int = 0
    """Needs of what runs between this graph's forward and backward: a loss outside the model, later graphs."""
    accumulates: bool = False
    """Whether gradients of earlier backward passes are still there when the step begins."""
    outside_graph: tuple[tuple[TensorKind, int], ...] = ()
    """Persistent bytes of other parts of the model, by kind."""
    pending_bytes: int = 0
    """Activations that other calls of the model keep for a backward before the update."""
    sums: bool = False
    """Whether gradients of the model's other calls, for the same parameters, are there in backward."""
    previous_bytes: int = 0
    """Outputs of the previous step, alive until forward returns its own."""
    guard_bytes: int = 0
    """Bytes that the guard program takes before forward."""
    clip_bytes: int = 0
    """Temporaries of clipping gradients; 0 if they are not clipped."""


@dataclass(frozen=True)
class Captured:
    """A Graph with the FX nodes that it was captured from."""

    graph: Graph
    joint: JointGraph
    nodes: dict[int, fx.Node]
    """The FX node of each op, by op id."""
    tensor_of: dict[StorageKey, int] = field(repr=False)
    """The id of each storage's tensor in the Graph."""
    partition: float | None = field(default=None, kw_only=True)
    """The `activation_memory_budget` with which Inductor split forward and backward."""

    @property
    def given(self) -> tuple[fx.Node, ...]:
        """The inputs of forward, in AOTAutograd's order."""
        return tuple(self.joint.primals)

    @property
    def results(self) -> Sequence[Any]:
        """What forward returns to the caller."""
        return self.joint.forward_outputs

    def updated_by(self, ops: Iterable[int]) -> list[int]:
        """Return the positions among the inputs of the parameters that these updates are of."""
        given = {argument for op in ops for argument in self.nodes[op].args}
        found = ((at, node) for at, node in enumerate(self.joint.primals) if node in given)
        kinds = ((at, self.graph.tensors[self.tensor_of[storages(node)[0]]].kind) for at, node in found)
        return [at for at, kind in kinds if kind is TensorKind.PARAMETER]

    def moves(self, primal: fx.Node) -> bool:
        """Return whether the input `primal` may be in the store between two ops."""
        return any(self.graph.tensors[self.tensor_of[key]].movable for key in storages(primal))


def elsewhere(kind: TensorKind) -> str:
    """Return the name of the tensor that stands for bytes of `kind` outside the graph."""
    return f"{kind} elsewhere"


def capture(joint: JointGraph, inputs: list[InputInfo], surroundings: Surroundings) -> Captured:
    """Return the Graph of the step around `joint`; `inputs` describes its inputs by position."""
    return CaptureOfStep(joint, inputs, surroundings).build()


class CaptureOfStep:
    """Builds the Graph around one joint graph."""

    def __init__(self, joint: JointGraph, inputs: list[InputInfo], surroundings: Surroundings) -> None:
        self.joint = joint
        self.inputs = inputs
        self.surroundings = surroundings
        self.tensors: list[Tensor] = []
        self.ops: list[Op] = []
        self.nodes: dict[int, fx.Node] = {}
        self.tensor_of: dict[StorageKey, int] = {}
        self.layers = LayerNames()
        self.lines = NodeLines()
        self.checkpoints: dict[int, int] = {}
        self.in_backward = self._touched(joint.backward) | self._output_storages(joint.backward_outputs)
        self.grads = self._output_storages(joint.backward_outputs)
        self.returned = self._output_storages(joint.forward_outputs)
        self.random_state: tuple[int, ...] = ()
        self.pending: tuple[int, ...] = ()
        self.previous: tuple[int, ...] = ()

    def build(self) -> Captured:
        """Return the Graph, with its ops and tensors mapped to the FX graph."""
        # Inputs, and what is on the device before forward.
        self._add_inputs()
        self._add_guards()
        self._add_pending()
        if self._is_random():
            self.random_state = (self._add_tensor(0, TensorKind.BUFFER, RANDOM_STATE, persistent=True),)
        # Forward and backward, each with what autograd and the caller do around it.
        measure([*self.joint.forward, *self.joint.backward])
        self._add_ops(Phase.FORWARD)
        self._add_write_back()
        self._add_tangents()
        self._add_ops(Phase.BACKWARD)
        self._add_gradients_and_update()
        self._add_handles()
        # Outputs that live on after the step.
        outputs = tuple(
            sorted(
                {self.tensor_of[key] for key in self.returned}
                - {t.id for t in self.tensors if t.persistent}
                - self._written_back
            )
        )
        return Captured(
            Graph("step", tuple(self.tensors), tuple(self.ops), outputs, self.whole_step, self.lines.found()),
            self.joint, self.nodes, self.tensor_of,
        )  # fmt: skip

    @property
    def whole_step(self) -> bool:
        """Whether the captured graph includes the optimizer's update."""
        return False

    def _add_handles(self) -> None:
        """Add bytes for handles of offloaded tensors, where the device is the CPU."""
        if self.joint.device.type == "cpu" and (movable := sum(t.movable for t in self.tensors)):
            self._add_tensor(HANDLE_BYTES * movable, TensorKind.WORKSPACE, HANDLES, persistent=True)

    def _is_random(self) -> bool:
        return any(is_random(node) for node in (*self.joint.forward, *self.joint.backward))

    def _add_ops(self, phase: Phase) -> None:
        for node in self.joint.forward if phase is Phase.FORWARD else self.joint.backward:
            self._add_node(node, phase)

    # -- tensors

    def _add_tensor(self, nbytes: int, kind: TensorKind, name: str, value: Any = None, **flags: bool) -> int:
        shape = tuple(int(n) for n in value.shape) if value is not None else (nbytes,)
        dtype = str(value.dtype).removeprefix("torch.") if value is not None else "uint8"
        of_host = value is not None and value.device.type == "cpu" and self.joint.device.type != "cpu"
        if of_host:  # a number, which no plan has to count
            nbytes, flags = 0, flags | {"movable": False}
        self.tensors.append(Tensor(len(self.tensors), nbytes, kind, name, shape, dtype, **flags))
        return len(self.tensors) - 1

    def _add_inputs(self) -> None:
        for position, node in enumerate(self.joint.primals):
            index = self._index(position, node)
            known = index < len(self.inputs)
            info = self.inputs[index] if known else InputInfo(TensorKind.INPUT, node.name)
            self._add_storages(node, info.kind, info.name, persistent=True, movable=info.movable)
        self._add_constants()
        for kind, nbytes in self.surroundings.outside_graph:
            if nbytes:
                self._add_tensor(nbytes, kind, elsewhere(kind), persistent=True)
        if nbytes := self.surroundings.optimizer_state_bytes:
            self._add_tensor(nbytes, TensorKind.OPTIMIZER_STATE, "optimizer state", persistent=True)

    def _index(self, position: int, node: fx.Node) -> int:
        """Return the index of the description of an input."""
        number, _ = input_of(node)
        return position if number is None else number

    def _add_constants(self) -> None:
        for node in (n for n in (*self.joint.forward, *self.joint.backward) if n.op == "get_attr"):
            self._add_storages(node, TensorKind.BUFFER, str(node.target), persistent=True)

    def _add_storages(self, node: fx.Node, kind: TensorKind, name: str, **flags: bool) -> None:
        sizes = storage_bytes(node)
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, torch.Tensor) and (key := storage_key(value)) not in self.tensor_of:
                self.tensor_of[key] = self._add_tensor(sizes[key], kind, name, value, **flags)

    def _kind(self, key: StorageKey, phase: Phase) -> TensorKind:
        if key in self.grads and phase is Phase.BACKWARD:
            return TensorKind.GRADIENT
        if phase is Phase.FORWARD and key in self.in_backward:
            return TensorKind.ACTIVATION
        return TensorKind.TEMPORARY

    def _touched(self, nodes: list[fx.Node]) -> set[StorageKey]:
        return {
            key
            for node in nodes
            if self.joint.is_op(node)
            for n in (node, *node.all_input_nodes)
            for key in storages(n)
        }

    def _output_storages(self, outputs: list[Any]) -> set[StorageKey]:
        return {key for n in outputs if isinstance(n, fx.Node) for key in storages(n)}

    # -- ops

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        in_forward = phase is Phase.FORWARD
        layer, layer_type = (self.layers.forward if in_forward else self.layers.backward)(node)
        frames = (self.lines.forward if in_forward else self.lines.backward)(node)
        if not self.joint.is_op(node):
            return
        # Tensors that it reads, and new storages that it makes.
        reads = self._ids({key for source in node.all_input_nodes for key in storages(source)})
        keys = [key for key in storages(node) if key not in self.tensor_of]
        sizes = storage_bytes(node)
        # The traced value reaches only as far as the view does, or as the result.
        if op_name(node) in CLONES_STORAGE or node.target in AS_LARGE_AS_INPUT:
            whole = sum(storage_bytes(node.args[0]).values())
            sizes = {key: max(nbytes, whole) for key, nbytes in sizes.items()}
        values = {storage_key(v): v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)}
        for key in keys:
            movable = key not in self.returned and len(self.joint.roots.get(key, ())) == 1
            self.tensor_of[key] = self._add_tensor(
                sizes[key], self._kind(key, phase), node.name, values[key], movable=movable
            )
        # What it updates in place, and whether it can be recomputed.
        updated = self._ids({key for arg in mutated_args(node) for key in storages(arg)})
        if is_random(node):  # each draw updates the generator, so random ops keep their order
            reads, updated = reads + self.random_state, updated + self.random_state
        writes = tuple(dict.fromkeys([*(self.tensor_of[key] for key in keys), *updated]))
        recompute_reads, recompute_writes = self._recomputation(node, phase, reads, writes)
        self.nodes[len(self.ops)] = node
        workspace = scratch_of(node)
        self._add_op(
            op_name(node), layer, layer_type, phase, reads, writes,
            flops=_flops(node), moved_bytes=_moved_bytes(node), workspace_bytes=workspace.nbytes,
            workspaces=workspace.blocks,
            recomputable=bool(recompute_writes), recompute_reads=recompute_reads, recompute_writes=recompute_writes,
            frames=frames, checkpoint=self._checkpoint(node) if in_forward else 0,
            given=()
            if into_memory(node) is None
            else tuple(self.tensor_of[key] for key in keys if sizes[key] == values[key].nbytes),
        )  # fmt: skip

    def _checkpoint(self, node: fx.Node) -> int:
        """Return the position, from 1, of the node's checkpoint among those of this graph; 0 if it has none."""
        mark = checkpoint_of(node)
        return 0 if mark is None else self.checkpoints.setdefault(mark, 1 + len(self.checkpoints))

    def _add_op(
        self,
        name: str,
        layer: str,
        kind: LayerType,
        phase: Phase,
        reads: tuple[int, ...],
        writes: tuple[int, ...],
        **more: Any,
    ) -> None:
        self.ops.append(Op(len(self.ops), name, layer, kind, phase, reads, writes, **more))

    def _ids(self, keys: set[StorageKey]) -> tuple[int, ...]:
        return tuple(sorted(self.tensor_of[key] for key in keys))

    def _recomputation(
        self, node: fx.Node, phase: Phase, reads: tuple[int, ...], writes: tuple[int, ...]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the tensors that a recomputation of `node` reads and writes; none if it may not be recomputed.

        Ops that read an input that the step updates are not recomputed either. Training batch norm is recomputed from
        its input alone (`runtime/emitter.py` calls the op that does so).
        """
        if phase is not Phase.FORWARD or not is_repeatable(node) or not writes:
            return (), ()
        # Batch norm without its running statistics.
        if recomputes_without_statistics(node):
            sources = (node_argument(node, name) for name in ("input", "weight", "bias"))
            reads = self._ids({k for source in sources if isinstance(source, fx.Node) for k in storages(source)})
            made_again = {storage_key(v) for v in results_without_statistics(node)}
            writes = tuple(self.tensor_of[key] for key in storages(node) if key in made_again)
        mutated = {self.tensor_of[key] for key in self.joint.mutated_storages if key in self.tensor_of}
        given = {tensor for tensor in mutated if self.tensors[tensor].persistent}
        if (
            given & set(reads)
            or mutated & set(writes)
            or any(len(self.joint.roots.get(key, ())) > 1 for key in storages(node))
        ):
            return (), ()
        return reads, writes

    # -- the step around the graph

    def _add_guards(self) -> None:
        if nbytes := self.surroundings.guard_bytes:
            self._add_op(GUARDS, "", LayerType.OTHER, Phase.FORWARD, (), (), workspace_bytes=nbytes, moved_bytes=nbytes)

    def _add_pending(self) -> None:
        if nbytes := self.surroundings.pending_bytes:
            self.pending = (self._add_tensor(nbytes, TensorKind.ACTIVATION, "other calls"),)
            self._add_op(PENDING, "", LayerType.OTHER, Phase.FORWARD, (), self.pending)
        if nbytes := self.surroundings.previous_bytes:
            self.previous = (self._add_tensor(nbytes, TensorKind.TEMPORARY, "outputs of the step before"),)
            self._add_op(PREVIOUS, "", LayerType.OTHER, Phase.FORWARD, (), self.previous)

    def _add_write_back(self) -> None:
        pairs = self.joint.write_backs
        self._written_back = {self.tensor_of[k] for value in pairs.values() for k in self._returned_as(value)}
        if pairs:
            targets = self._ids({k for primal in pairs for k in storages(primal)})
            reads = tuple(sorted(self._written_back | set(targets)))
            self._add_op(WRITE_BACK, "", LayerType.UPDATE, Phase.FORWARD, reads, targets)
        if self.previous:
            self._add_op(RETURN, "", LayerType.OTHER, Phase.FORWARD, self.previous, ())

    def _returned_as(self, output: fx.Node) -> Iterable[StorageKey]:
        """Return the storages in which forward returns an output."""
        return storages(output)

    def _add_tangents(self) -> None:
        if nbytes := self.surroundings.reserved_bytes:
            self._add_op(REST, "", LayerType.OTHER, Phase.BACKWARD, (), (), workspace_bytes=nbytes)
        before = len(self.tensors)
        for node in self.joint.given_tangents:
            self._add_storages(node, TensorKind.GRADIENT, node.name)
        if self.surroundings.sums and not self.surroundings.accumulates and (nbytes := self._gradient_bytes()):
            self.pending += (self._add_tensor(nbytes, TensorKind.GRADIENT, "gradients of other calls"),)
        if new := tuple(range(before, len(self.tensors))):
            self._add_op(TANGENTS, "", LayerType.OTHER, Phase.BACKWARD, (), new)

    def _gradient_bytes(self) -> int:
        sizes: dict[StorageKey, int] = {}
        for node in self.joint.backward_outputs:
            if isinstance(node, fx.Node):
                sizes.update(storage_bytes(node))
        return sum(sizes.values())

    def _relaid_bytes(self) -> int:
        """Return the bytes of the largest gradient that autograd copies for a layout that is not its parameter's."""
        values = dict(zip(self.joint.backward_outputs, self._gradient_values(), strict=True))
        pairs = ((values[made], primal.meta["val"]) for primal, made in self.joint.gradients.items())
        found = (value for value, of in pairs if isinstance(value, torch.Tensor) and not lies_as(value, of))
        return max((value.numel() * value.element_size() for value in found), default=0)

    def _gradient_values(self) -> Sequence[Any]:
        """Return the fake tensors that backward returns, by position."""
        return [n.meta.get("val") if isinstance(n, fx.Node) else None for n in self.joint.backward_outputs]

    def _add_gradients_and_update(self) -> None:
        tangents = () if TANGENTS_ARE_GIVEN else self._ids({k for n in self.joint.given_tangents for k in storages(n)})
        gradients = self._ids({key for key in self.grads if key in self.tensor_of})
        if not gradients:
            return
        # Gradients of this pass are added to those kept from earlier ones.
        kept: tuple[int, ...] = ()
        if self.surroundings.accumulates:
            nbytes = sum(self.tensors[t].nbytes for t in gradients)
            kept = (self._add_tensor(nbytes, TensorKind.GRADIENT, "accumulated gradients", persistent=True),)
        reads = tuple(dict.fromkeys((*gradients, *tangents, *kept, *self.pending)))
        self._add_op(GRADIENTS, "", LayerType.UPDATE, Phase.BACKWARD, reads, kept, workspace_bytes=self._relaid_bytes())
        if nbytes := self.surroundings.clip_bytes:
            clipped = kept or gradients
            moved = 3 * sum(self.tensors[t].nbytes for t in clipped)  # read for the norm, and scaled
            self._add_op(
                CLIP, "", LayerType.UPDATE, Phase.UPDATE, clipped, (), workspace_bytes=nbytes, moved_bytes=moved
            )
        # Then the optimizer updates parameters and its state. Frozen parameters count too, but are not read.
        owned = tuple(
            t.id for t in self.tensors if t.kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE) and t.persistent
        )
        trained = set(self._ids({key for primal in self.joint.gradients for key in storages(primal)}))
        changed = (self.tensors[t] for t in owned)
        moved = self.surroundings.update_moved_bytes or sum(
            self.tensors[t].nbytes for t in kept or gradients
        ) + 2 * sum(t.nbytes for t in changed if t.id in trained or t.kind is TensorKind.OPTIMIZER_STATE)
        self._add_op(
            UPDATE, "", LayerType.UPDATE, Phase.UPDATE, tuple(dict.fromkeys((*owned, *(kept or gradients)))), owned,
            workspace_bytes=self.surroundings.update_bytes, moved_bytes=moved,
        )  # fmt: skip


def lies_as(gradient: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether autograd keeps a gradient of this layout.

    As `obeys_layout_contract` in torch/csrc/autograd/utils/grad_layout_contract.h.
    """
    if not is_dense(parameter):
        return gradient.is_contiguous()
    places = zip(gradient.shape, gradient.stride(), parameter.stride(), strict=True)
    return all(ours == theirs for size, ours, theirs in places if size != 1)


def _flops(node: fx.Node) -> int:
    if not has_formula(node.target) or not has_fakes(node):
        return 0
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    return flops_of_call(node.target, args, kwargs, node.meta["val"])


def _moved_bytes(node: fx.Node) -> int:
    if node.target is torch.ops.aten.empty.memory_format:
        return 0
    values = tree_leaves([n.meta.get("val") for n in node.all_input_nodes] + [node.meta.get("val")])
    return moved_bytes(value for value in values if isinstance(value, torch.Tensor))
