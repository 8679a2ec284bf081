"""Joint graphs of PyTorch, read as runtimes by tags run them, and the tags of their nodes."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor, fx

from overspill.capture.compiled.batch_norm import recomputes_without_statistics
from overspill.capture.compiled.graph import Captured
from overspill.capture.compiled.joint import JointGraph, copied, storages
from overspill.capture.compiled.scratch import reduces_in_place
from overspill.core import Graph, Op, Phase, TensorKind
from overspill.core.errors import RequestError, UnsupportedError
from overspill.pytorch.node_tags import BACKWARD, DESCRIPTION, PARTITION
from overspill.pytorch.trees import tree_leaves

from .node_tags import Tag, TaggedStep

GATHERS = (torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor)
"""Collectives that may run again: those by which FSDP gathers parameters."""


def read_joint(module: fx.GraphModule, num_fwd_outputs: int) -> tuple[JointGraph, dict[fx.Node, str]]:
    """Return the joint graph of a copy of `module`, and the name in `module` of each node of the copy."""
    if not isinstance(module, fx.GraphModule):
        raise RequestError(f"plan_graph takes an fx.GraphModule, not a {type(module).__name__}")
    outputs = tree_leaves(module.graph.find_nodes(op="output")[0].args)
    if not 0 < num_fwd_outputs < len(outputs):
        raise RequestError(
            f"num_fwd_outputs={num_fwd_outputs}, and the graph has {len(outputs)} outputs; those of forward come "
            "first, then the gradients"
        )
    if bare := next((n for n in module.graph.find_nodes(op="placeholder") if "val" not in n.meta), None):
        raise RequestError(f'input {bare.name} has no meta["val"]; trace the graph with fake tensors')
    copy = copied(module)
    names = {ours: node.name for ours, node in zip(copy.graph.nodes, module.graph.nodes, strict=True)}
    by_aot = DESCRIPTION in copy.graph.find_nodes(op="output")[0].meta
    if not by_aot:
        if not any(node.meta.get(BACKWARD) for node in copy.graph.nodes):
            raise RequestError(
                f'no node has meta["{BACKWARD}"], which tells those of backward; trace as torchtitan does, or pass the '
                "joint graph of AOTAutograd"
            )
        _describe(copy, len(outputs))
    joint = JointGraph(copy, num_fwd_outputs)
    if not by_aot:
        _check_order(joint)
    return joint, names


def _describe(module: fx.GraphModule, count: int) -> None:
    """Give a graph of `make_fx` the marks that AOTAutograd gives its joint graphs."""
    module.graph.find_nodes(op="output")[0].meta[DESCRIPTION] = [f"output {i}" for i in range(count)]
    for node in module.graph.nodes:
        if node.meta.get(BACKWARD):
            node.meta[PARTITION] = "is_backward"


def _check_order(joint: JointGraph) -> None:
    """Raise UnsupportedError if a node of backward comes before one of forward, as with losses in chunks."""
    forward, marked = set(joint.forward), False
    for node in joint.module.graph.nodes:
        marked = marked or bool(node.meta.get(BACKWARD))
        if marked and node in forward:
            raise UnsupportedError(
                f"forward and backward alternate in the graph: {node.name} of forward follows nodes of backward; trace "
                "the loss in one piece"
            )


def as_run_by_tags(captured: Captured) -> Graph:
    """Return the graph as runtimes by tags run it."""
    graph, joint = captured.graph, captured.joint
    tensors, ops = list(graph.tensors), [_as_tags_recompute(op, captured.nodes.get(op.id)) for op in graph.ops]
    # Handles of transfers are Overspill's own.
    tensors = [replace(t, nbytes=0) if t.kind is TensorKind.WORKSPACE and t.persistent else t for t in tensors]
    # So is the copy of a loss that a kernel reduces in its own memory: without it, all of that memory stays.
    for number, node in captured.nodes.items():
        if reduces_in_place(node):
            (loss,) = (tensors[captured.tensor_of[key]] for key in storages(node))
            tensors[loss.id] = replace(loss, nbytes=max(loss.nbytes, ops[number].workspace_bytes))
            ops[number] = replace(ops[number], workspace_bytes=0)
    # AOTAutograd's backward holds the gradients that it is given until it ends.
    given = tuple(captured.tensor_of[key] for node in joint.given_tangents for key in storages(node))
    last = max((op.id for op in ops if op.phase is Phase.BACKWARD), default=None)
    if last is not None:
        ops[last] = replace(ops[last], reads=tuple(dict.fromkeys((*ops[last].reads, *given))))
    return replace(graph, tensors=tuple(tensors), ops=tuple(ops))


def _as_tags_recompute(op: Op, node: fx.Node | None) -> Op:
    """Return `op` without its checkpoint, with whether other runtimes run `node` again for the same bits."""
    op = replace(op, checkpoint=0)
    if node is None or op.phase is not Phase.FORWARD:
        return op
    if getattr(node.target, "overloadpacket", None) in GATHERS:
        return replace(op, recomputable=True, recompute_reads=op.reads, recompute_writes=op.writes)
    # PyTorch would run batch norm again with statistics that forward has updated.
    if op.recomputable and recomputes_without_statistics(node):
        return replace(op, recomputable=False, recompute_reads=(), recompute_writes=())
    return op


def offloadable(captured: Captured) -> frozenset[int]:
    """Return the tensors that other runtimes can offload."""
    roots = captured.joint.roots.items()
    return frozenset(captured.tensor_of[key] for key, nodes in roots if all(map(_may_leave, nodes)))


def _may_leave(node: fx.Node) -> bool:
    """Return whether other runtimes offload the value of `node`: it is contiguous, and no collective makes it."""
    value = node.meta["val"]
    collective = getattr(node.target, "namespace", None) == "_c10d_functional"
    return isinstance(value, Tensor) and value.is_contiguous() and not collective


def tags_of_nodes(captured: Captured, step: TaggedStep) -> dict[fx.Node, Tag]:
    """Return the tag of each node that backward reads, directly or to recompute another, and that follows from none.

    Ops that autograd needs for its formulas alone would otherwise be free to run in forward.
    """
    joint, tags = captured.joint, dict[fx.Node, Tag]()
    follows = _following(joint)
    nodes = [node for node in (*joint.forward, *joint.backward) if node not in follows]
    wanted = {source for node in follows for source in node.all_input_nodes}
    wanted |= {node for node in joint.backward_outputs if isinstance(node, fx.Node)}
    for node in reversed(nodes):
        if node not in wanted or node.op != "call_function":
            continue
        tags[node] = _tag_of(captured, step, node)
        if tags[node] is Tag.RECOMPUTE or node.target is operator.getitem:
            wanted.update(node.all_input_nodes)
    return tags


def _following(joint: JointGraph) -> set[fx.Node]:
    """Return the nodes of backward that runtimes always run there: by their marks, or because a gradient is read."""
    if not joint.tangents:
        return {node for node in joint.backward if node.meta.get(BACKWARD)}
    found: set[fx.Node] = set()
    given = set(joint.tangents)
    for node in joint.backward:
        if not given.isdisjoint(node.all_input_nodes):
            given.add(node)
            found.add(node)
    return found


def _tag_of(captured: Captured, step: TaggedStep, node: fx.Node) -> Tag:
    joint, graph = captured.joint, captured.graph
    tensors = [captured.tensor_of[key] for key in storages(node) if key in captured.tensor_of]
    made = [graph.ops[graph.producer[tensor]].phase for tensor in tensors if tensor in graph.producer]
    if joint.is_view(node) or Phase.BACKWARD in made:
        return Tag.RECOMPUTE
    its = {step.tags.get(tensor, Tag.SAVE) for tensor in tensors}
    if Tag.RECOMPUTE in its:
        return Tag.RECOMPUTE
    # Of several results each has a node of its own, with its tag.
    alone = isinstance(node.meta.get("val"), Tensor)
    return Tag.OFFLOAD if alone and Tag.OFFLOAD in its else Tag.SAVE
