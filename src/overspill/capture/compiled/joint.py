"""Read AOTAutograd's joint forward-backward graph: storages, views, mutations and phases."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from overspill.core.errors import UnsupportedError
from overspill.pytorch.dispatch import HigherOrderOperator, OpOverload
from overspill.pytorch.fake_tensors import FakeTensor, FakeTensorMode
from overspill.pytorch.graphs import PARAMETER_SOURCES, SOURCE, LazyGraphModule
from overspill.pytorch.schemas import argument, position_of, written_arguments
from overspill.pytorch.storages import key_of
from overspill.pytorch.trees import tree_leaves

from .effects import EFFECT, is_token
from .formulas import put_right

SOURCES = (PARAMETER_SOURCES, SOURCE)
"""Attributes in which Dynamo keeps where a module's parameters and inputs come from."""
NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"
"""AOTAutograd's key in a node's meta: saved for backward without autograd's check for in-place changes."""
BACKWARD_TAGS = ("is_backward", "must_be_in_backward")
"""AOTAutograd's `partitioner_tag` of nodes of the backward, the usual one first."""
SNAPSHOT = "overspill_snapshot"
"""Key in a node's meta: it is the copy of an input that backward reads and forward updates."""
ABSENT = "overspill_absent"
"""Key in a tangent's meta: the tangent is None when backward runs."""
StorageKey = int
"""The identity of a fake tensor's storage, equal for all its views and aliases."""


def device_of(graph: fx.Graph) -> torch.device:
    """Return the device on which `graph` runs: that of its first tensor on an accelerator, otherwise the CPU.

    Numbers of the host may come before that tensor, and a graph may make all tensors that it has.
    """
    values = (node.meta.get(key) for node in graph.nodes for key in ("val", "example_value"))
    devices = (value.device for value in tree_leaves(list(values)) if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def input_of(node: fx.Node) -> tuple[int | None, tuple[str, ...]]:
    """Return the number of Dynamo's input that a primal is, and the path to it inside of that; None if of several."""
    desc, path = node.meta.get("desc"), tuple[str, ...]()
    while hasattr(desc, "attr"):  # a tensor inside of a subclass
        desc, path = desc.base, (desc.attr, *path)
    return getattr(desc, "idx", None), path


class JointGraph:
    """The joint graph of `module`, split into forward and backward, with its storages.

    A *view* node makes no storage of its own. A *root* is the first node of a storage, from which views are made. Nodes
    that no output depends on are left out unless they draw random numbers or mutate.
    """

    def __init__(self, module: fx.GraphModule, num_forward_outputs: int) -> None:
        self.module = module
        _refuse_dynamic_shapes(module.graph)
        put_right(module.graph)
        self._read_outputs(num_forward_outputs)
        self._split()
        if self._snapshot_mutated_inputs():
            self._split()
        self._find_roots()

    def copied(self) -> JointGraph:
        """Return a copy of the graph that may be changed."""
        return type(self)(copied(self.module), len(self.forward_outputs))

    def _read_outputs(self, num_forward_outputs: int) -> None:
        output = self.module.graph.find_nodes(op="output")[0]
        outputs = tree_leaves(output.args)
        descs = tree_leaves(output.meta["desc"], is_leaf=lambda x: not isinstance(x, (list, tuple)))
        self.forward_outputs: list[Any] = outputs[:num_forward_outputs]
        self.backward_outputs: list[Any] = outputs[num_forward_outputs:]
        self.forward_descs: list[Any] = descs[:num_forward_outputs]
        self.backward_descs: list[Any] = descs[num_forward_outputs:]
        placeholders = self.module.graph.find_nodes(op="placeholder")
        self.primals = [n for n in placeholders if "tangents" not in str(n.target)]
        self.tangents = [n for n in placeholders if "tangents" in str(n.target)]
        self.snapshots = [n for n in self.module.graph.nodes if SNAPSHOT in n.meta]

    @property
    def fake_mode(self) -> FakeTensorMode:
        """The mode of its fake tensors; a graph may have them without inputs."""
        nodes = self.module.graph.nodes
        return next(value.fake_mode for n in nodes if isinstance(value := n.meta.get("val"), FakeTensor))

    @cached_property
    def device(self) -> torch.device:
        """The device on which the graph runs."""
        return device_of(self.module.graph)

    @cached_property
    def write_backs(self) -> dict[fx.Node, fx.Node]:
        """Inputs that AOTAutograd updates after forward, with the output that has the new value."""
        by_desc = {repr(p.meta.get("desc")): p for p in self.primals}
        return {
            by_desc[repr(desc.mutated_input)]: value
            for desc, value in zip(self.forward_descs, self.forward_outputs, strict=True)
            if type(desc).__name__ == "InputMutationAOTOutput" and isinstance(value, fx.Node)
        }

    @cached_property
    def gradients(self) -> dict[fx.Node, fx.Node]:
        """Inputs that get a gradient, with the backward output that is this gradient.

        Those of a tensor subclass, whose gradient is a plain tensor, are none of them.
        """
        by_desc = {repr(p.meta.get("desc")): p for p in self.primals}
        found = zip(self.backward_descs, self.backward_outputs, strict=True)
        grads = ((d, v) for d, v in found if type(d).__name__ == "GradAOTOutput" and isinstance(v, fx.Node))
        return {by_desc[of]: value for desc, value in grads if (of := repr(desc.grad_of)) in by_desc}

    @cached_property
    def given_tangents(self) -> list[fx.Node]:
        """The tangents that are not None when backward runs."""
        return [tangent for tangent in self.tangents if ABSENT not in tangent.meta]

    @cached_property
    def differentiable(self) -> dict[int, fx.Node]:
        """Outputs of forward that may get a gradient, by autograd's position, in the order of `tangents`."""
        # Tokens, by which AOTAutograd orders checks of matrices, come before the outputs and after their gradients.
        pairs = zip(self.forward_descs, self.forward_outputs, strict=True)
        known = {repr(desc): (i, node) for i, (desc, node) in enumerate(p for p in pairs if not is_token(p[0]))}
        descs = (tangent.meta["desc"] for tangent in self.tangents)
        return dict(known[repr(desc.output)] for desc in descs if not is_token(desc))

    @cached_property
    def made_into_loss(self) -> frozenset[int]:
        """Positions of the outputs that a returned scalar follows from, as a loss follows from its logits."""
        before = {n for n in self.differentiable.values() if not n.meta["val"].dim()}
        numbers, found = set(before), set[StorageKey]()
        for node in reversed(self.module.graph.nodes):
            if node in before:
                before.update(node.all_input_nodes)
                found.update(() if node in numbers else storages(node))
        return frozenset(
            i for i, n in self.differentiable.items() if n not in numbers and found.issuperset(storages(n))
        )

    @cached_property
    def mutated_storages(self) -> frozenset[StorageKey]:
        """Storages of inputs that the step updates, after forward or by a mutating node."""
        nodes = set(self.write_backs)
        for node in self.module.graph.nodes:
            nodes.update(mutated_args(node))
        return frozenset(key for node in nodes for key in storages(node))

    def _snapshot_mutated_inputs(self) -> bool:
        """Let backward read a clone of each input that forward updates; return whether there is one.

        The clone is made before forward runs, because backward needs the value that forward saw. (Stock AOTAutograd
        reads the updated one in 2.11 to 2.13.)
        """
        found = False
        for primal in self.primals:
            if set(storages(primal)) & self.mutated_storages:
                late = {n: [u for u in n.users if self._reads_late(u)] for n in _aliases(primal)}
                if any(late.values()):
                    self._snapshot(primal, {n: users for n, users in late.items() if users})
                    found = True
        return found

    def _reads_late(self, user: fx.Node) -> bool:
        return user in self.backward_set and not mutated_args(user) and not self.is_view(user)

    def _snapshot(self, primal: fx.Node, readers: dict[fx.Node, list[fx.Node]]) -> None:
        graph = self.module.graph
        # The clone comes first of all, right behind the inputs.
        mode = primal.meta["val"].fake_mode
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            snapshot = graph.call_function(torch.ops.aten.clone.default, (primal,))
        with mode:
            snapshot.meta = {"val": primal.meta["val"].clone(), "partitioner_tag": "must_be_in_forward", SNAPSHOT: True}
        self.snapshots.append(snapshot)
        # Views that backward reads are made again, of the clone.
        copies = {primal: snapshot}

        def copy_of(node: fx.Node) -> fx.Node:
            if node not in copies:
                source = next(a for a in node.all_input_nodes if set(storages(a)) & set(storages(node)))
                base = copy_of(source)
                with graph.inserting_after(node):
                    copied = graph.node_copy(node, lambda n: base if n is source else n)
                args, kwargs = fx.node.map_arg((copied.args, copied.kwargs), lambda n: n.meta["val"])
                with mode:
                    copied.meta = {**node.meta, "val": node.target(*args, **kwargs)}
                copies[node] = copied
            return copies[node]

        for alias, users in readers.items():
            for user in users:
                user.replace_input_with(alias, copy_of(alias))

    def _split(self) -> None:
        """Split the nodes: forward has what its outputs need and its draws and mutations, backward has the rest."""
        nodes = list(self.module.graph.nodes)
        kept = [n for n in nodes if n.op == "call_function" and (mutated_args(n) or is_random(n) or EFFECT in n.meta)]
        in_forward = [n for n in kept if n.meta.get("partitioner_tag") not in BACKWARD_TAGS]
        forward = _ancestors([*_nodes(self.forward_outputs), *in_forward, *self.snapshots])
        if any(tangent in forward for tangent in self.tangents):
            raise UnsupportedError(
                "a forward output depends on a gradient, as where forward and backward of a Function both update a "
                "buffer (an amax history); give each a buffer of its own, or use overspill.train_step"
            )
        # Only nodes that something depends on, in the order of the graph.
        needed = _ancestors([*_nodes(self.backward_outputs), *kept]) | forward
        body = [n for n in nodes if n.op in ("call_function", "get_attr") and n in needed]
        self.forward = [n for n in body if n in forward]
        self.backward = [n for n in body if n not in forward]
        self.backward_set = frozenset(self.backward)

    def _find_roots(self) -> None:
        self.roots: dict[StorageKey, list[fx.Node]] = {}
        for node in [*self.primals, *self.tangents, *self.forward, *self.backward]:
            if isinstance(node.meta.get("val"), torch.Tensor) and not self.is_view(node) and not mutated_args(node):
                (key,) = storages(node)
                self.roots.setdefault(key, []).append(node)

    def is_view(self, node: fx.Node) -> bool:
        """Return whether `node` only makes a view of one of its inputs, and changes nothing."""
        if node.op != "call_function" or node.target is operator.getitem or mutated_args(node):
            return self._is_view_item(node)
        made = storages(node)
        read = {key for source in node.all_input_nodes for key in storages(source)}
        return bool(made) and set(made) <= read

    def _is_view_item(self, node: fx.Node) -> bool:
        """Return whether `node` picks one result of a node that only makes views (`split`, `unbind`)."""
        return node.op == "call_function" and node.target is operator.getitem and self.is_view(node.args[0])

    def is_op(self, node: fx.Node) -> bool:
        """Return whether `node` computes: it is no input, view or pick of a result."""
        return node.op == "call_function" and node.target is not operator.getitem and not self.is_view(node)


def has_fakes(node: fx.Node) -> bool:
    """Return whether the fakes of all that a node reads and makes are there; a constant of the graph has none."""
    return all("val" in n.meta for n in (node, *node.all_input_nodes))


def storages(node: fx.Node) -> list[StorageKey]:
    """Return the keys of the distinct storages in a node's value.

    Raises UnsupportedError for sparse and other layouts.
    """
    keys: dict[StorageKey, None] = {}
    for value in tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            keys[key_of(_storage(node, value))] = None
    return list(keys)


def storage_bytes(node: fx.Node) -> dict[StorageKey, int]:
    """Return the bytes of each storage in a node's value, by key."""
    values = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return {key_of(s): int(s.nbytes()) for s in (_storage(node, v) for v in values)}


def _storage(node: fx.Node, value: torch.Tensor) -> torch.UntypedStorage:
    if value.layout is not torch.strided:
        raise UnsupportedError(
            f"{node.name} is a {value.layout} tensor; Overspill supports dense tensors (try sparse=False)"
        )
    return value.untyped_storage()


def is_random(node: fx.Node) -> bool:
    """Return whether `node` draws random numbers, itself or in a graph that it calls."""
    if isinstance(node.target, HigherOrderOperator):
        called = (
            getattr(node.graph.owning_module, str(a.target), None) for a in node.all_input_nodes if a.op == "get_attr"
        )
        return any(is_random(n) for graph in called if isinstance(graph, fx.GraphModule) for n in graph.graph.nodes)
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def is_repeatable(node: fx.Node) -> bool:
    """Return whether `node` gives the same bits when it runs again, so that a plan may recompute it.

    Only aten ops do, because their tags can be trusted: those that draw no random numbers and change nothing in place.
    """
    op = node.target
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return False
    return torch.Tag.nondeterministic_bitwise not in op.tags and not is_random(node) and not mutated_args(node)


def draws(node: fx.Node) -> bool:
    """Return whether `node` really draws random numbers."""
    if isinstance(node.target, OpOverload):
        return call_draws(node.target, node.args, node.kwargs)
    return is_random(node)


def call_draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of `op` draws random numbers: attention is tagged random even without dropout."""
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    return position_of(op, "dropout_p") is None or argument(op, args, kwargs, "dropout_p") != 0.0


def mutated_args(node: fx.Node) -> list[fx.Node]:
    """Return the arguments that `node` updates in place."""
    if (positions := getattr(node.target, "updates", None)) is not None:  # a call of a compiled program
        return [node.args[i] for i in positions]
    written = written_arguments(node.target, node.args, node.kwargs)
    return _nodes(written) if written else []


def _nodes(values: Any) -> list[fx.Node]:
    return [v for v in tree_leaves(values) if isinstance(v, fx.Node)]


def _ancestors(nodes: list[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending.extend(node.all_input_nodes)
    return found


def _aliases(root: fx.Node) -> Iterator[fx.Node]:
    """Yield `root` and all views made from it."""
    keys = set(storages(root))
    pending, seen = [root], {root}
    while pending:
        node = pending.pop()
        yield node
        for user in node.users:
            if (
                user not in seen
                and user.op == "call_function"
                and not mutated_args(user)
                and set(storages(user)) & keys
            ):
                seen.add(user)
                pending.append(user)


def _refuse_dynamic_shapes(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        symbolic = isinstance(value, (torch.SymInt, torch.SymFloat)) or (
            isinstance(value, torch.Tensor)
            and any(isinstance(n, torch.SymInt) for n in (*value.shape, *value.stride()))
        )
        if symbolic:
            raise UnsupportedError(
                "the graph has dynamic shapes, for which no byte budget can be promised; "
                "pass dynamic=False to torch.compile, or use overspill.compile (each shape then gets its own plan)"
            )


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of the graph for another compilation, with Dynamo's sources of its inputs."""
    graph = fx.Graph()
    output = graph.output(graph.graph_copy(module.graph, {}))
    output.meta = dict(module.graph.find_nodes(op="output")[0].meta)
    found = LazyGraphModule(module, graph)  # nobody calls it
    found.meta = dict(module.meta)
    inputs = (m.graph.find_nodes(op="placeholder") for m in (module, found))
    for here, there in ((module, found), *zip(*inputs, strict=True)):
        for name in SOURCES:
            if hasattr(here, name):
                setattr(there, name, getattr(here, name))
    return found
