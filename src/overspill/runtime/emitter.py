"""Emit the instructions of a Schedule as calls of an FX graph.

Run copies the captured node, Recompute copies it again, and transfers are calls of `runtime/transfer/ops.py`. Free
needs no node: a value is dropped after its last use. If the schedule keeps it longer, `hold` marks a later use.

Assumed, not checked: backward's inputs are saved tensors, those with `saved_tensor_with_no_vc_check` last, then
tangents.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from overspill.capture.compiled.batch_norm import (
    call_without_statistics,
    recomputes_without_statistics,
    results_without_statistics,
)
from overspill.capture.compiled.chosen_rows import RUN_AS as CHOSEN
from overspill.capture.compiled.gathers import Gather, StartCollective, wait
from overspill.capture.compiled.graph import GRADIENTS, WRITE_BACK, Captured
from overspill.capture.compiled.joint import NO_VERSION_CHECK, JointGraph, storages
from overspill.capture.compiled.kernels import RUN_AS
from overspill.capture.compiled.result_memory import into_memory
from overspill.capture.compiled.scratch import reduces_in_place
from overspill.capture.compiled.whole_step import MUTATION, UPDATE
from overspill.capture.programs.functions import ProgramFunction, allocated_as, compile_functions
from overspill.core import Instruction, Op, Verb
from overspill.core.errors import InvalidScheduleError
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.graphs import LazyGraphModule, SavedForBackwardsAOTOutput

from .arena import Arena, kept_storage_at, storage_at, tensor_at
from .transfer import ops
from .transfer.host_lane import listed
from .values import Values

HANDLE_PREFIX = "handle_of_"
"""Prefix of the names of a whole step's inputs that are handles."""
OP_ID = "overspill_op"
"""Key in an emitted node's meta: the op that it runs."""
DOES = "overspill_does"
"""Key in an emitted node's meta: the verb that it carries out, and the op or tensor."""
TOGETHER = "overspill_together"
"""Key in an emitted node's meta: how many other ops run in the same call."""
HOLDS = "overspill_holds"
"""Key in an input's meta: the tensor that it is."""
_UPDATES = (Verb.RUN, Verb.RUN_ON_HOST)
Together = Callable[[Sequence[Callable[..., None]]], Callable[..., None]]
"""Merges several functions into one, which takes a tuple of arguments for each."""


class Emitter:
    """Emits one graph."""

    def __init__(self, captured: Captured, engine: int, *, backward: bool, arena: Arena) -> None:
        self.captured = captured
        self.arena = arena
        self.memory: fx.Node | None = None
        self.position = 0
        self.started: dict[int, fx.Node] = {}  # collectives that nothing has waited for, by op
        self.joint: JointGraph = captured.joint
        self.engine = engine
        self.backward = backward
        self.graph = fx.Graph()
        # Variables by captured root, handles and prefetches by tensor.
        self.values = Values(captured, self.graph)
        self.handles: dict[int, fx.Node] = {}
        self.arriving: dict[int, fx.Node] = {}
        self.returned: dict[fx.Node, fx.Node] = {}
        self.returned_later: Container[fx.Node] = ()
        # Updates that are merged into one call.
        self.groups: dict[int, tuple[int, ...]] = {}
        self.together: Together | None = None
        self.updates_on_host = False
        # Copies that go on to the disk below the store, or come back from it, before an instruction at a position.
        self.moments: Mapping[int, Sequence[tuple[Callable[..., None], int]]] = {}
        self.last_touch: dict[int, int] = {}
        self.now = 0
        self.fake_mode = next(
            n.meta["val"].fake_mode for n in self.joint.module.graph.nodes if isinstance(n.meta.get("val"), FakeTensor)
        )
        # The captured nodes that each tensor's views are made from.
        self._roots: dict[int, list[fx.Node]] = {}
        for key, roots in self.joint.roots.items():
            if key in captured.tensor_of:
                self._roots.setdefault(captured.tensor_of[key], []).extend(roots)

    def roots_of(self, tensor: int) -> list[fx.Node]:
        """Return the captured nodes from which views of `tensor` are made."""
        return self._roots.get(tensor, [])

    def known_as(self, tensor: int, node: fx.Node) -> None:
        """Let a tensor of the plan be this captured node alone, of which other nodes of this graph are made."""
        self._roots[tensor] = [node]

    # -- inputs and outputs

    def add_placeholder(self, node: fx.Node) -> None:
        """Add an input of the captured graph."""
        self.values[node] = self._place_root(node)

    def add_handle(self, tensor: int) -> None:
        """Add a captured input whose bytes are in the store."""
        root = self._only_root(tensor)
        with self.fake_mode:
            handle = ops.fake_handle()
        self.handles[tensor] = self._place(HANDLE_PREFIX + root.name, {"val": handle})

    def add_saved(self, saved: Iterable[fx.Node], handles: Iterable[int], forward: Emitter) -> None:
        """Add the inputs that forward saved.

        Handles come before tensors that need no version check, which are last.
        """
        kept = list(saved)
        for root in (r for r in kept if not r.meta.get(NO_VERSION_CHECK)):
            self.values[root] = self._place_root(root)
        if forward.memory is not None and kept:
            self.memory = self._place(forward.memory.name, forward.memory.meta)
        for tensor in handles:
            handle = forward.handles[tensor]
            self.handles[tensor] = self._place(handle.name, handle.meta)
        for root in (r for r in kept if r.meta.get(NO_VERSION_CHECK)):
            self.values[root] = self._place_root(root)

    def _place(self, name: str, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta = dict(meta)
        return node

    def _place_root(self, root: fx.Node) -> fx.Node:
        """Add an input that is a whole tensor."""
        node = self._place(root.name, root.meta)
        node.meta[HOLDS] = next((self.captured.tensor_of.get(key) for key in storages(root)), None)
        return node

    def results(self, returned: Iterable[Any], saved: list[fx.Node], handles: list[int]) -> tuple[list[Any], list[Any]]:
        """Return what forward returns, with AOTAutograd's descriptions: `returned`, then what `add_saved` expects."""
        checked = [self.values[r] for r in saved if not r.meta.get(NO_VERSION_CHECK)]
        unchecked = [self.values[r] for r in saved if r.meta.get(NO_VERSION_CHECK)]
        memory = [self.memory] if self.memory is not None and saved else []  # a reference keeps the memory
        extra = [*checked, *memory, *(self.handles[t] for t in handles), *unchecked]
        outputs = [self.returned.get(n) or self.values.own(n) if isinstance(n, fx.Node) else n for n in returned]
        descs = [*self.joint.forward_descs, *(SavedForBackwardsAOTOutput(i) for i in range(len(extra)))]
        return [*outputs, *extra], descs

    def finish(self, outputs: list[Any], descs: list[Any]) -> fx.GraphModule:
        """Return the graph with these outputs, which AOTAutograd describes as `descs`."""
        if self.updates_on_host:
            self._call(ops.end_updates, (self.engine,), "updates_on_host")
        if self.memory is not None:
            self._call(ops.hold, (self.memory,), "held_arena")
        self.graph.output(tuple(outputs)).meta["desc"] = descs
        self.graph.lint()
        compile_functions(self.graph)
        return LazyGraphModule(self.joint.module, self.graph)  # a LoweredProgram reads it, and nobody calls it

    # -- instructions

    def emit(self, instructions: Sequence[tuple[int, Instruction]]) -> None:
        """Emit this graph's instructions, each with its position in the schedule."""
        placed = {position for _, position in self.arena.places.offsets}
        if self.memory is None and any(position in placed for position, _ in instructions):
            self._take_arena()
        remaining = iter(instructions)
        for position, instruction in remaining:
            self.position = position
            self._emit_moments(position)
            if instruction.verb in _UPDATES and (group := self.groups.get(instruction.target)):
                others = [next(remaining) for _ in group[1:]]
                assert group[1:] == tuple(other.target for _, other in others)
                for other, _ in others:
                    self._emit_moments(other)
                together = self._run_together if instruction.verb is Verb.RUN else self._run_on_host
                together([self.captured.graph.ops[op] for op in group])
            else:
                self._emit(instruction.verb, instruction.target)

    def _emit_moments(self, position: int) -> None:
        for call, tensor in self.moments.get(position, ()):
            self._call(call, (self.handles[tensor], self.engine), f"{call.__name__}_{self._only_root(tensor).name}")

    def _emit(self, verb: Verb, target: int) -> None:
        if verb is Verb.RUN:
            self._run(self.captured.graph.ops[target])
        elif verb is Verb.RECOMPUTE:
            self._recompute(self.captured.graph.ops[target])
        elif verb is Verb.START:
            node = self.captured.nodes[target]
            started = self._in_given(node) or self.graph.node_copy(node, self.values.resolve)
            started.target = StartCollective(started.target)
            started.meta = {"val": None, OP_ID: target, DOES: (verb, target)}
            self.started[target] = started
        elif verb is Verb.RUN_ON_HOST:
            self._run_on_host([self.captured.graph.ops[target]])
        elif verb is Verb.FREE:
            self._free(target)
        # Transfers: a call of the engine, whose result is a handle or the arriving tensor.
        elif verb is Verb.OFFLOAD:
            root = self._only_root(target)
            handle = self._call(ops.offload, (self.values[root], self.engine), f"handle_{root.name}")
            with self.fake_mode:
                handle.meta.update(val=ops.fake_handle(), **{DOES: (verb, target)})
            self.handles[target] = handle
            self._touch(target)
        elif verb is Verb.AWAIT_OFFLOAD:
            root = self._only_root(target)
            given = self.handles[target], self.values[root], self.engine
            self._call(ops.await_offload, given, f"left_{root.name}").meta[DOES] = verb, target
            self._touch(target)
        elif verb is Verb.PREFETCH:
            root = self._only_root(target)
            lasts = target in self.arena.places.between
            into = self._place_in_arena(kept_storage_at if lasts else storage_at, target)
            given = self.handles[target], self.engine, *into
            arriving = self._call(ops.prefetch, given, f"arriving_{root.name}")
            arriving.meta.update(val=root.meta["val"], **{DOES: (verb, target)})
            self.arriving[target] = arriving
        else:
            root = self._only_root(target)
            arrived = self._call(ops.await_prefetch, (self.arriving.pop(target), self.engine), root.name)
            arrived.meta.update(val=root.meta["val"], **{DOES: (verb, target)})
            self.values[root] = arrived
            self._touch(target)

    def _run(self, op: Op) -> None:
        node = self.captured.nodes.get(op.id)
        self.now += 1
        if node is None:
            # What is handed out here may be freed by the schedule next: take it while it is there.
            handed = {WRITE_BACK: self.joint.write_backs.values(), GRADIENTS: self.joint.backward_outputs}.get(
                op.name, ()
            )
            self.returned.update(
                {n: self.values.own(n) for n in handed if isinstance(n, fx.Node) and n not in self.returned_later}
            )
            return
        does = Verb.RUN, op.id
        new = self._copy(node, does)
        new.meta = {**node.meta, OP_ID: op.id, DOES: does}
        self._take_results(node, new, self._results(node))
        self._touch(*op.reads, *op.writes)

    def _run_together(self, group: Sequence[Op]) -> None:
        """Emit one call for several updates, none of which returns a value."""
        nodes = [self.captured.nodes[op.id] for op in group]
        self.now += 1
        assert self.together is not None
        call = self.together([node.target for node in nodes])
        given = tuple(fx.node.map_arg(node.args, self.values.resolve) for node in nodes)
        new = self._call(call, given, f"{nodes[0].name}_and_{len(nodes) - 1}_others")
        new.meta.update({DOES: (Verb.RUN, group[0].id), TOGETHER: len(group) - 1})
        first = nodes[0].meta[MUTATION]
        new.meta[MUTATION] = replace(first, layer=f"{first.layer} and {len(nodes) - 1} others")
        for op in group:
            self._touch(*op.reads, *op.writes)

    def _run_on_host(self, group: Sequence[Op]) -> None:
        """Emit the start of one call that updates the store's copies of what the ops read and write."""
        nodes = [self.captured.nodes[op.id] for op in group]
        for op, node in zip(group, nodes, strict=True):
            mutation = node.meta.get(MUTATION)
            if mutation is None or mutation.op != UPDATE:
                raise InvalidScheduleError(f"{op.name} of {op.layer} is no update, and cannot run on the host")
            if lacking := [t for t in (*op.reads, *op.writes) if t not in self.handles]:
                raise InvalidScheduleError(
                    f"{self.captured.graph.tensors[lacking[0]].name} is not in the store for its update"
                )
        # Its arguments are views of what is in the store, which the host's thread makes.
        written = tuple(dict.fromkeys(tensor for op in group for tensor in op.writes))
        touched, views = tuple(dict.fromkeys((*(tensor for op in group for tensor in op.reads), *written))), fx.Graph()
        there = Values(self.captured, views)
        for tensor in touched:
            root = self._only_root(tensor)
            there[root] = views.placeholder(root.name)
        args = tuple(fx.node.map_arg(node.args, there.resolve) for node in nodes)
        run = nodes[0].target
        if len(nodes) > 1:
            assert self.together is not None
            run = self.together([node.target for node in nodes])
        views.output(args if len(nodes) > 1 else args[0])
        what = listed([node.meta[MUTATION].layer or op.name for op, node in zip(group, nodes, strict=True)])
        call = ops.UpdateOnHost(run, views, self.engine, what)
        given, writes = (tuple(self.handles[tensor] for tensor in of) for of in (touched, written))
        new = self._call(call, (given, writes), nodes[0].name)
        new.meta.update({
            OP_ID: group[0].id, DOES: (Verb.RUN_ON_HOST, group[0].id), MUTATION: nodes[0].meta[MUTATION],
            TOGETHER: len(group) - 1,
        })  # fmt: skip
        self.updates_on_host = True

    def _recompute(self, op: Op) -> None:
        node = self.captured.nodes[op.id]
        self.now += 1
        results = self._results(node)
        # A batch norm must not update its running statistics again.
        if recomputes_without_statistics(node):
            kept = results_without_statistics(node)
            target, args = call_without_statistics(node)
            new = self._call(target, fx.node.map_arg(args, self.values.resolve), node.name)
            new.meta = {**node.meta, "val": kept}
            new.meta.pop("tensor_meta", None)
            results = [r for r in results if r.args[1] < len(kept)]
        else:
            new = self._copy(node, (Verb.RECOMPUTE, op.id))
            new.meta = dict(node.meta)
        new.meta.update(
            {OP_ID: op.id, DOES: (Verb.RECOMPUTE, op.id), "partitioner_tag": "is_backward", "autograd_backward": True}
        )
        self._take_results(node, new, [r for r in results if r not in self.values])
        self._touch(*op.recompute_reads, *op.recompute_writes)

    def _copy(self, node: fx.Node, does: tuple[Verb, int]) -> fx.Node:
        if (started := self.started.pop(does[1], None)) is not None:
            return self._call(wait, (started,), node.name)
        new = self._in_place(node) or self._in_given(node) or self.graph.node_copy(node, self.values.resolve)
        new.target = node.meta.get(CHOSEN, RUN_AS.get(new.target, new.target))
        if not reduces_in_place(node):
            return new
        new.meta[DOES] = does  # with the copy, which has its name
        alone = self._call(torch.ops.aten.clone.default, (new,), node.name)
        new.meta = {**node.meta, **alone.meta, "val": node.meta["val"]}
        return alone

    def _in_place(self, node: fx.Node) -> fx.Node | None:
        """Return a call of an op that makes its result at its place in the arena; None without a place."""
        offsets, keys = self.arena.places.offsets, storages(node)
        if len(keys) != 1 or (self.captured.tensor_of.get(keys[0]), self.position) not in offsets:
            return None
        if (how := into_memory(node)) is None:
            return None
        (memory,) = self._given(node)
        args, kwargs = fx.node.map_arg((how.args, how.kwargs), self.values.resolve)
        args, kwargs = (args, {**kwargs, how.name: memory}) if how.name else ((memory, *args), kwargs)
        new = self.graph.create_node("call_function", how.target, args, kwargs, name=node.name)
        new.meta = dict(node.meta)
        return new

    def _in_given(self, node: fx.Node) -> fx.Node | None:
        """Return a call of a program or a gather that writes results to their places; None without places."""
        if not (self.arena.places.offsets and isinstance(node.target, (ProgramFunction, Gather))):
            return None
        is_gather = isinstance(node.target, Gather)
        roots: dict[Any, fx.Node] = {
            root.args[1] if is_gather else allocated_as(root): root for root in self._results(node)
        }
        places = {name: at for name, root in roots.items() if name is not None for at in self._given(root)}
        if not places:
            return None
        new = self.graph.node_copy(node, self.values.resolve)
        new.target, new.args = node.target.given(list(places)), (*places.values(), *new.args)
        return new

    def _given(self, root: fx.Node) -> list[fx.Node]:
        """Return the memory of a new tensor at its place in the arena; an empty list without a place."""
        value = root.meta["val"]
        (tensor,) = (self.captured.tensor_of[key] for key in storages(root))
        return self._place_in_arena(tensor_at, tensor, tuple(value.shape), value.stride(), value.dtype)

    def _place_in_arena(self, what: Callable[..., Any], tensor: int, *layout: Any) -> list[fx.Node]:
        """Return a call of `what` for the present place of the tensor; an empty list without a place."""
        offset = self.arena.places.offsets.get((tensor, self.position))
        if offset is None:
            return []
        placed = self.captured.graph.tensors[tensor]
        return [self._call(what, (self.memory, offset, placed.nbytes, *layout), f"place_{placed.name}")]

    def _take_arena(self) -> None:
        """Take the arena before any other allocation, so that none is in its way."""
        assert self.arena.take is not None
        self.memory = self._call(self.arena.take, (), "arena")
        with self.fake_mode:
            self.memory.meta["val"] = torch.empty(self.arena.places.arena_bytes, dtype=torch.uint8)

    def _results(self, node: fx.Node) -> list[fx.Node]:
        """Return the captured nodes for the results of `node`: itself, or its getitems."""
        if isinstance(node.meta.get("val"), torch.Tensor):
            return [node]
        return [user for user in node.users if user.target is operator.getitem]

    def _take_results(self, node: fx.Node, new: fx.Node, results: list[fx.Node]) -> None:
        for result in results:
            if result is node:
                self.values[node] = new
            else:
                self.values[result] = self.graph.call_function(operator.getitem, (new, result.args[1]))
                self.values[result].meta = dict(result.meta)

    def _free(self, tensor: int) -> None:
        roots = [root for root in self.roots_of(tensor) if root in self.values]
        if self.last_touch.get(tensor, -1) != self.now and roots:
            for root in roots:
                self._call(ops.hold, (self.values[root],), f"held_{root.name}")
        for root in roots:
            self.values.drop(root)

    def _call(self, target: Any, args: tuple[Any, ...], name: str) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        node.meta["val"] = None
        if self.backward:
            node.meta.update(partitioner_tag="is_backward", autograd_backward=True)
        return node

    def _touch(self, *tensors: int) -> None:
        self.last_touch.update(dict.fromkeys(tensors, self.now))

    def _only_root(self, tensor: int) -> fx.Node:
        roots = self.roots_of(tensor)
        if len(roots) != 1:
            raise InvalidScheduleError(
                f"{self.captured.graph.tensors[tensor].name} has {len(roots)} roots and cannot be moved"
            )
        return roots[0]
