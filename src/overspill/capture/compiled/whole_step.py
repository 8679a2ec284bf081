"""Capture the whole training step as one Graph: forward, backward, gradients and update.

The joint graph (`step_joint.py`) gets the write-backs of buffers, then nodes that call the caller's `GradientOps` for
each gradient. Parameters, optimizer state and accumulated gradients are persistent tensors that may move.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, fx, nn

from overspill.capture.sharding import GATHER, SCATTER
from overspill.core import Collective, CollectiveKind, LayerType, Op, Phase, TensorKind, numbered
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import storage_key

from .backward import Backward
from .gathers import Gather, GatheredGroup, Scatter, with_gathers
from .graph import Captured, CaptureOfStep, InputInfo, Surroundings
from .joint import JointGraph, storage_bytes, storages
from .known_values import KnownValues
from .pieces import in_pieces
from .step_joint import joint_of_step, returned

NORM, CLIP, REDUCE, ACCUMULATE, UPDATE, COPY = (
    "step.norm", "step.clip", "step.reduce", "step.accumulate", "step.update", "step.copy",
)  # fmt: skip
"""Ops of the whole step that are not part of the model."""
MUTATION = "overspill_mutation"
"""Key in a node's meta: its `Mutation`, an in-place change, so it cannot run twice."""


@dataclass(frozen=True)
class Mutation:
    """An in-place change of a parameter or gradient."""

    op: str
    """UPDATE or REDUCE."""
    layer: str

    def __str__(self) -> str:
        """Return the change in words, for messages."""
        return f"the {self.op.removeprefix('step.')} of {self.layer or 'a gradient'}"


OutsideGraph = tuple[tuple[TensorKind, int], ...]
"""Bytes outside the graph that are on the device during all of the step, by kind."""
AT_ONCE = frozenset({COPY, ACCUMULATE, REDUCE, SCATTER})
"""Ops that run as soon as their gradient is complete, not after all of backward."""

PROCESS_GROUP = "process group"
"""A tensor of no bytes that each collective updates, because all ranks have to call them in the same order."""
BUCKET_BYTES = 25 * 2**20
"""The most bytes of gradients in one bucket, as in DistributedDataParallel (`bucket_cap_mb`)."""


@dataclass(frozen=True)
class StateInfo:
    """Name and fake value of one tensor of an optimizer's state."""

    name: str
    value: FakeTensor


@dataclass(frozen=True)
class AtOnce:
    """One call for all updates of an optimizer."""

    run: Callable[..., None]
    """`run(runs, scale, given)`: each `ParameterUpdate`'s `run`, and its parameter, gradient and state in `given`."""
    workspace_bytes: int
    """Bytes that `run` takes while it runs."""
    why: str
    """The optimizer's name, and the reason for one call."""
    draws: bool
    """Whether `run` may draw random numbers."""
    moved_bytes: int = 0
    """What `run` reads and writes; 0: nobody knows."""


@dataclass(frozen=True)
class ParameterUpdate:
    """The optimizer's update of one parameter."""

    parameter: int
    """Its position among the inputs."""
    run: Callable[..., None]
    """`run(parameter, gradient, scale, *state)` updates in place; `scale` is `GradientOps.clip`'s result or None."""
    state: tuple[StateInfo, ...] = ()
    workspace_bytes: int = 0
    """Bytes that `run` takes while it runs."""
    elementwise: bool = False
    """Whether each element is updated alone. If not, `run` needs the gradient in autograd's memory layout."""
    changes_gradient: bool = False
    """Whether `run` may change the gradient in place."""
    at_once: AtOnce | None = None
    """Updates with the same one are one op."""
    moved_bytes: tuple[int, int] = (0, 0)
    """What `run` reads and writes, on the device and on the host; 0: nobody knows."""


@dataclass(frozen=True)
class GradientOps:
    """Functions applied to gradients up to the update, in order; None skips one."""

    updates: tuple[ParameterUpdate, ...] = ()
    """The optimizer's updates; only the last micro-batch has them."""
    accumulate: Callable[[Tensor, Tensor], None] | None = None
    """`accumulate(sum, gradient)` adds to a tensor that stays from one micro-batch to the next."""
    reduce: Callable[..., None] | None = None
    """`reduce(*gradients)` averages a bucket of gradients or sums over processes, in place; last micro-batch only."""
    ranks: int = 1
    """The number of these processes."""
    groups: tuple[GatheredGroup, ...] = ()
    """Parameters that are gathered, and whose gradients are scattered."""
    norm: Callable[[Tensor], Tensor] | None = None
    """`norm(gradient)` returns a number."""
    clip: Callable[..., Tensor] | None = None
    """`clip(*norms)` takes the norms of all gradients and returns the factor that updates scale by."""


@dataclass(frozen=True)
class CapturedStep(Captured):
    """A captured whole step, with its loss, other results and parameter updates."""

    loss: fx.Node
    others: tuple[fx.Node, ...]
    updates: tuple[ParameterUpdate, ...]
    """Only of parameters that get a gradient."""
    micro_batches: int = field(default=1, kw_only=True)
    """How many it has beside one another; then `others` are the losses of those behind the first."""

    @property
    def results(self) -> Sequence[fx.Node]:
        """The loss, then the other results."""
        return self.loss, *self.others


@dataclass(frozen=True)
class TracedStep:
    """The joint graph of a training step, and what `captured` needs to make the step's Graph around it."""

    joint: JointGraph
    inputs: Sequence[InputInfo]
    values: Sequence[FakeTensor]
    ops: GradientOps

    def captured(self, outside_graph: OutsideGraph = ()) -> CapturedStep:
        """Return the captured step; `outside_graph` is on the device during all of it, untouched by its ops."""
        return self._around(self.joint, outside_graph)

    def ways(self) -> Iterator[Callable[[OutsideGraph], CapturedStep]]:
        """Yield functions like `captured`, for the step as traced and in pieces of rows.

        The second is missing if the step has no chains worth it.
        """
        yield self.captured
        if (divided := in_pieces(self.joint)) is not None:
            yield partial(self._around, divided)

    def _around(self, joint: JointGraph, outside_graph: OutsideGraph) -> CapturedStep:
        around = around_step(self.values, outside_graph)
        joint = with_gathers(joint, self.ops.groups) if self.ops.groups else joint.copied()
        return CaptureOfWholeStep(joint, list(self.inputs), self.ops, around).build()


def trace_step(
    step: Callable[..., Tensor | tuple[Tensor, ...]],
    module: nn.Module,
    inputs: Sequence[InputInfo],
    values: Sequence[FakeTensor],
    ops: GradientOps,
    named: Callable[[str], str] = str,
) -> TracedStep:
    """Trace one training step on fake tensors: nothing is computed.

    `step(*values)` returns the scalar loss, or a tuple of it and of other tensors without gradients. `values` are fake
    tensors of one mode: parameters and buffers of `module`, and what the caller passes at each step. `inputs` describes
    them. Ops have the names of layers of `module`, which `named` makes of their paths. Raises UnsupportedError for a
    step that cannot be captured.
    """
    backward = Backward([info.name for info in inputs], several=ops.accumulate is not None)
    return TracedStep(joint_of_step(step, module, values, backward, named), inputs, values, ops)


def around_step(values: Sequence[FakeTensor], outside_graph: OutsideGraph) -> Surroundings:
    """Return the other bytes on the device: `outside_graph`, and those of the guard program."""
    mode = values[0].fake_mode
    guards = mode.guards().nbytes if isinstance(mode, KnownValues) else 0
    return Surroundings(outside_graph=outside_graph, guard_bytes=guards)


class CaptureOfWholeStep(CaptureOfStep):
    """Builds the Graph of a whole step: a joint graph, then gradients and update."""

    def __init__(
        self, joint: JointGraph, inputs: list[InputInfo], ops: GradientOps, surroundings: Surroundings
    ) -> None:
        self.gradient_ops = ops
        self.sums: dict[int, fx.Node] = {}
        self.states: dict[int, list[fx.Node]] = {}
        self.input_nodes = list(joint.primals)
        self.updates = tuple(u for u in ops.updates if self.input_nodes[u.parameter] in joint.gradients)
        self.graph = joint.module.graph
        self.fake_mode = joint.fake_mode
        self._add_placeholders(joint, inputs)
        super().__init__(joint, inputs, surroundings)

    def _add_placeholders(self, joint: JointGraph, inputs: list[InputInfo]) -> None:
        """Add inputs that the joint graph does not have: optimizer state, and accumulated gradients."""
        for update in self.updates:
            position, name = update.parameter, inputs[update.parameter].name
            self.states[position] = [
                self._placeholder(joint, inputs, f"{name}.{state.name}", TensorKind.OPTIMIZER_STATE, state.value)
                for state in update.state
            ]
        if self.gradient_ops.accumulate is not None:
            for primal in joint.gradients:
                position = self.input_nodes.index(primal)
                with self.fake_mode:
                    like = torch.empty_like(primal.meta["val"].detach())
                name = f"{inputs[position].name}.grad"
                self.sums[position] = self._placeholder(joint, inputs, name, TensorKind.GRADIENT, like)

    def _placeholder(
        self, joint: JointGraph, inputs: list[InputInfo], name: str, kind: TensorKind, value: Tensor
    ) -> fx.Node:
        with self.graph.inserting_after(joint.primals[-1]):
            node = self.graph.placeholder(name.replace(".", "_"))
        node.meta = {"val": value}
        joint.primals.append(node)
        joint.roots[storages(node)[0]] = [node]
        inputs.append(InputInfo(kind, name, movable=True))
        return node

    def build(self) -> CapturedStep:
        captured = super().build()
        order = early(captured.graph.ops)
        graph = replace(captured.graph, ops=numbered(captured.graph.ops[old] for old in order))
        nodes = {new: captured.nodes[old] for new, old in enumerate(order) if old in captured.nodes}
        loss, *others = returned(self.graph)
        return CapturedStep(graph, captured.joint, nodes, captured.tensor_of, loss, tuple(others), self.updates)

    @property
    def whole_step(self) -> bool:
        return True

    def _add_write_back(self) -> None:
        """Copy new values into buffers right after forward, as AOTAutograd would."""
        self._written_back = set()
        for primal, value in self.joint.write_backs.items():
            with self.graph.inserting_after(self._last_node()):
                copy = self.graph.call_function(torch.ops.aten.copy_.default, (primal, value))
            copy.meta = {"val": primal.meta["val"]}
            self._add_node(copy, Phase.FORWARD)
            self._written_back |= {self.tensor_of[key] for key in storages(value)}

    def _last_node(self) -> fx.Node:
        return self.graph.find_nodes(op="output")[0].prev

    def _add_gradients_and_update(self) -> None:
        ops = self.gradient_ops
        # Take gradients in the order in which backward completes them.
        gradients = {self.input_nodes.index(primal): node for primal, node in self.joint.gradients.items()}
        made = {tensor: op.id for op in self.ops for tensor in op.writes}
        complete = {p: max(made.get(t, -1) for t in self._behind(node)) for p, node in gradients.items()}
        gradients = {position: gradients[position] for position in sorted(gradients, key=complete.__getitem__)}
        # Each rank gets its rows of sharded ones; add up micro-batches, then average over processes.
        gradients = self._scattered(gradients)
        if ops.accumulate is not None:
            for position, node in gradients.items():
                total = self.sums[position]
                self._step_op(ACCUMULATE, ops.accumulate, (total, node), Phase.BACKWARD, updates=(total,))
            gradients = {position: self.sums[position] for position in gradients}
        if ops.reduce is not None:
            gradients = {position: self._own(node) for position, node in gradients.items()}
            self._add_reductions(ops.reduce, ops.ranks, gradients.values())
        # Clip by the norm of all gradients, then update each parameter.
        scale = self._scale({update.parameter: gradients[update.parameter] for update in self.updates})
        shared = Counter(tensor for node in gradients.values() for tensor in self._behind(node))
        together: dict[AtOnce, list[tuple[ParameterUpdate, fx.Node]]] = {}
        for update in self.updates:
            parameter, state = self.input_nodes[update.parameter], self.states[update.parameter]
            gradient, run, copied = gradients[update.parameter], update.run, 0
            if update.changes_gradient:
                alone = all(shared[tensor] == 1 for tensor in self._behind(gradient))
                gradient = self._own(gradient) if alone else self._copy(gradient)
            if update.at_once is not None:
                together.setdefault(update.at_once, []).append((update, gradient))
                continue
            if not update.elementwise and (strides := self._other_strides(parameter, gradient)) is not None:
                run, copied = _update_by_copy(run, strides), gradient.meta["val"].nbytes
            changed = (gradient,) if update.changes_gradient else ()
            self._step_op(
                UPDATE, run, (parameter, gradient, scale, *state), Phase.UPDATE, updates=(parameter, *state, *changed),
                workspace_bytes=update.workspace_bytes + copied, layer=self.inputs[update.parameter].name,
                moved_bytes=update.moved_bytes,
            )  # fmt: skip
        for at_once, lot in together.items():
            self._update_at_once(at_once, lot, scale)

    def _update_at_once(
        self, at_once: AtOnce, lot: Sequence[tuple[ParameterUpdate, fx.Node]], scale: fx.Node | None
    ) -> None:
        """Add one op for all updates of an optimizer."""
        runs = [update.run for update, _ in lot]
        given = [(self.input_nodes[u.parameter], gradient, *self.states[u.parameter]) for u, gradient in lot]
        strides = [self._other_strides(parameter, gradient) for parameter, gradient, *_ in given]
        copied = sum(
            gradient.meta["val"].nbytes for (_, gradient), other in zip(lot, strides, strict=True) if other is not None
        )

        def run(scale: Tensor | None, *flat: Tensor) -> None:
            rest = iter(flat)
            lots = [[*islice(rest, len(of))] for of in given]
            for each, other in zip(lots, strides, strict=True):
                if other is not None:
                    each[1] = _laid_out(each[1], other)
            at_once.run(runs, scale, lots)

        flat = tuple(node for each in given for node in each)
        self._step_op(
            UPDATE, run, (scale, *flat), Phase.UPDATE, updates=flat, layer=f"all parameters by {at_once.why}",
            workspace_bytes=at_once.workspace_bytes + copied, moved_bytes=(at_once.moved_bytes, 0),
            ordered_by=self.random_state if at_once.draws else (),
        )  # fmt: skip

    def _behind(self, node: fx.Node) -> tuple[int, ...]:
        """Return the ids of the tensors that `node` is a view of."""
        return self._ids(set(storages(node)))

    def _add_node(self, node: fx.Node, phase: Phase) -> None:
        if isinstance(node.target, Gather):
            self._add_gather(node, node.target)
        else:
            super()._add_node(node, phase)

    def _add_gather(self, node: fx.Node, gather: Gather) -> None:
        group = gather.group
        reads = self._ids({key for source in node.all_input_nodes for key in storages(source)})
        writes = []
        for position, value in zip(group.positions, node.meta["val"], strict=True):
            key = storage_key(value)
            self.tensor_of[key] = self._add_tensor(
                value.nbytes, TensorKind.PARAMETER, f"{self.inputs[position].name} gathered", value, movable=True
            )
            writes.append(self.tensor_of[key])
        self.nodes[len(self.ops)] = node
        nbytes = sum(value.nbytes for value in node.meta["val"])
        self._add_op(
            GATHER, group.name, LayerType.OTHER, Phase.FORWARD, reads, tuple(writes),
            workspace_bytes=group.gather_workspace_bytes, moved_bytes=nbytes, recomputable=True, recompute_reads=reads,
            recompute_writes=tuple(writes), given=tuple(writes),
            collective=Collective(CollectiveKind.GATHER, nbytes, group.ranks),
            checkpoint=self.checkpoints.setdefault(-gather.number, 1 + len(self.checkpoints)) if group.reshards else 0,
        )  # fmt: skip

    def _scattered(self, gradients: dict[int, fx.Node]) -> dict[int, fx.Node]:
        """Return `gradients` with those of sharded parameters scattered, group by group."""
        found = dict(gradients)
        last = {position: place for place, position in enumerate(gradients)}
        groups = [(group, [p for p in group.positions if p in gradients]) for group in self.gradient_ops.groups]
        for group, positions in sorted((g for g in groups if g[1]), key=lambda g: max(map(last.__getitem__, g[1]))):
            values = []
            for position in positions:
                with self.fake_mode:
                    values.append(torch.empty_like(self.input_nodes[position].meta["val"].detach()))
            given = tuple(gradients[position] for position in positions)
            parts = self._step_op(
                SCATTER, Scatter(group, positions), given, Phase.BACKWARD, value=values, layer=group.name,
                workspace_bytes=group.scatter_workspace_bytes(positions),
                collective=Collective(
                    CollectiveKind.SCATTER, sum(node.meta["val"].nbytes for node in given), group.ranks
                ),
            )  # fmt: skip
            for place, position in enumerate(positions):
                with self.graph.inserting_after(self._last_node()):
                    found[position] = self.graph.call_function(operator.getitem, (parts, place))
                found[position].meta = {"val": values[place]}
                self.joint.roots[storages(found[position])[0]] = [found[position]]
        return found

    def _own(self, gradient: fx.Node) -> fx.Node:
        """Return a gradient to change in place: a copy if forward or the caller owns it."""
        if all(self.tensors[tensor].kind is TensorKind.GRADIENT for tensor in self._behind(gradient)):
            return gradient
        return self._copy(gradient)

    def _copy(self, gradient: fx.Node) -> fx.Node:
        with self.fake_mode:
            value = gradient.meta["val"].clone()
        return self._step_op(COPY, torch.ops.aten.clone.default, (gradient,), Phase.BACKWARD, value=value)

    def _add_reductions(self, reduce: Callable[..., None], ranks: int, gradients: Iterable[fx.Node]) -> None:
        """Add a reduction for each bucket.

        Schedules keep the order of reductions, because all of them update the tensor PROCESS_GROUP.
        """
        group = self._add_tensor(0, TensorKind.BUFFER, PROCESS_GROUP, persistent=True)
        distinct = {self._behind(node): node for node in gradients}
        for bucket in _buckets([self.joint.roots[storages(n)[0]][0] for n in distinct.values()]):
            nbytes = sum(map(_nbytes, bucket))
            self._step_op(
                REDUCE, reduce, bucket, Phase.BACKWARD, updates=bucket, ordered_by=(group,),
                workspace_bytes=nbytes if len(bucket) > 1 else 0,
                collective=Collective(CollectiveKind.REDUCE, nbytes, ranks),
            )  # fmt: skip

    def _scale(self, gradients: Mapping[int, fx.Node]) -> fx.Node | None:
        norm, clip = self.gradient_ops.norm, self.gradient_ops.clip
        if norm is None or clip is None or not gradients:
            return None
        norms = [self._norm(norm, self.input_nodes[position], node) for position, node in gradients.items()]
        with self.fake_mode:
            factor = torch.empty_like(norms[0].meta["val"])
        return self._step_op(CLIP, clip, tuple(norms), Phase.UPDATE, value=factor)

    def _norm(self, norm: Callable[[Tensor], Tensor], parameter: fx.Node, gradient: fx.Node) -> fx.Node:
        """Add the norm of a gradient in autograd's layout, on which sums depend."""
        value: Tensor = gradient.meta["val"]
        with self.fake_mode:
            number = torch.empty((), dtype=value.dtype, device=value.device)
        run, copied = norm, 0
        if (strides := self._other_strides(parameter, gradient)) is not None:
            run, copied = _norm_by_copy(norm, strides), value.nbytes
        return self._step_op(NORM, run, (gradient,), Phase.UPDATE, value=number, workspace_bytes=copied)

    def _other_strides(self, parameter: fx.Node, gradient: fx.Node) -> tuple[int, ...] | None:
        """Return the parameter's strides, in which autograd lays a gradient out; None if the gradient has them."""
        value, strides = gradient.meta["val"], parameter.meta["val"].stride()
        alike = (n == 1 or one == other for n, one, other in zip(value.shape, value.stride(), strides, strict=True))
        return None if all(alike) else strides

    def _step_op(
        self,
        name: str,
        run: Callable[..., Any],
        args: tuple[fx.Node | None, ...],
        phase: Phase,
        *,
        updates: Sequence[fx.Node] = (),
        value: Tensor | Sequence[Tensor] | None = None,
        workspace_bytes: int = 0,
        layer: str = "",
        ordered_by: tuple[int, ...] = (),
        collective: Collective | None = None,
        moved_bytes: tuple[int, int] = (0, 0),
    ) -> fx.Node:
        """Add an Op and a node calling `run(*args)`, which changes `updates` in place or makes `value`.

        Several values are the elements of a tuple. The op counts as an update of the tensors `ordered_by` too, though
        they are not among its arguments. `moved_bytes` are those on the device and on the host; where they are 0, each
        tensor that it reads and each that it writes counts once.
        """
        with self.graph.inserting_after(self._last_node()):
            node = self.graph.call_function(run, args)
        node.meta = {"val": value}
        if name in (UPDATE, REDUCE):
            node.meta[MUTATION] = Mutation(name, layer)
        # Tensors that it reads and writes, with new ones for its results.
        reads = self._ids({key for n in node.all_input_nodes for key in storages(n)}) + ordered_by
        writes = self._ids({key for n in updates for key in storages(n)}) + ordered_by
        if isinstance(value, Tensor):
            self.joint.roots[storages(node)[0]] = [node]
        for made in () if value is None else (value,) if isinstance(value, Tensor) else value:
            kind = TensorKind.GRADIENT if name == SCATTER else TensorKind.TEMPORARY
            key = storage_key(made)
            # Updates on the host read the factor there.
            self.tensor_of[key] = self._add_tensor(made.nbytes, kind, node.name, made, movable=name == CLIP)
            writes = (*writes, self.tensor_of[key])
        self.nodes[len(self.ops)] = node
        moved = sum(self.tensors[t].nbytes for t in (*reads, *writes))
        self._add_op(
            name, layer, LayerType.UPDATE, phase, reads, writes,
            workspace_bytes=workspace_bytes, moved_bytes=moved_bytes[0] or moved, collective=collective,
            moved_on_host_bytes=moved_bytes[1],
        )  # fmt: skip
        return node


def _laid_out(gradient: Tensor, strides: tuple[int, ...]) -> Tensor:
    return gradient.new_empty_strided(gradient.shape, strides).copy_(gradient)


def _norm_by_copy(norm: Callable[[Tensor], Tensor], strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    return lambda gradient: norm(_laid_out(gradient, strides))


def _update_by_copy(run: Callable[..., None], strides: tuple[int, ...]) -> Callable[..., None]:
    return lambda parameter, gradient, *given: run(parameter, _laid_out(gradient, strides), *given)


def early(ops: Sequence[Op]) -> list[int]:
    """Return the ids of `ops` in order, with those in `AT_ONCE` right after the op that completes their gradient."""
    forward_end = max((op.id for op in ops if op.phase is Phase.FORWARD), default=-1)
    behind: list[int] = []  # for each op, itself or the one that it stands right behind
    written: dict[int, int] = {}
    touched: dict[int, int] = {}
    for op in ops:
        place = op.id
        if op.name in AT_ONCE:
            before = *(written.get(t, -1) for t in op.reads), *(touched.get(t, -1) for t in op.writes)
            place = max(forward_end, *before)
        behind.append(place)
        written.update(dict.fromkeys(op.writes, place))
        touched.update((t, max(place, touched.get(t, -1))) for t in (*op.reads, *op.writes))
    return sorted(range(len(ops)), key=lambda op: (behind[op], op))


def _buckets(gradients: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    """Group `gradients`, in order of completion, in buckets of one dtype and device.

    Many small collectives are slow. But a bucket is packed into a tensor of its own, and holds its gradients until it
    is full. So it is no larger than the largest gradient.
    """
    limit = min(BUCKET_BYTES, max(map(_nbytes, gradients), default=0))
    filling: dict[Any, list[fx.Node]] = {}
    for node in gradients:
        bucket = filling.setdefault((node.meta["val"].dtype, node.meta["val"].device), [])
        if bucket and sum(map(_nbytes, bucket)) + _nbytes(node) > limit:
            yield tuple(bucket)
            bucket.clear()
        bucket.append(node)
    yield from (tuple(bucket) for bucket in filling.values())


def _nbytes(node: fx.Node) -> int:
    return sum(storage_bytes(node).values())
