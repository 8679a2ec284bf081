"""The gradient pass: forward and backward of a symbol as one graph.

Nodes are in the order in which MXNet's executor runs them. After `src/nnvm/gradient.cc`, and `InitFullGraph` and
`AggregateGradient` of `src/executor/graph_executor.cc`, MXNet 1.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise

from overspill.core.errors import UnsupportedError

from .operators import Operator, operator_of
from .shapes import Shape, Shapes, known
from .symbol import VARIABLE, Node, NodeOutput, Symbol

INPLACE_SUM_CAP = 8
"""MXNET_EXEC_INPLACE_GRAD_SUM_CAP: as many gradients and more are added one after the other."""
HEAD_GRADIENT = "head_grad"
TRAINED = "__grad_req__"
"""The attribute of a variable that has no gradient if it is `null`."""


@dataclass(frozen=True)
class MxnetStep:
    """A training step in execution order; `nodes[i]` makes entries of `shapes[i]`."""

    nodes: tuple[Node, ...]
    shapes: tuple[tuple[Shape, ...], ...]
    of: tuple[Operator | None, ...]
    """The operator of each node."""
    forward: tuple[int | None, ...]
    """The forward node whose gradient the node is; None: it is a forward node, or a sum of gradients."""
    forward_count: int
    heads: tuple[NodeOutput, ...]
    """The network's outputs."""
    gradients: dict[str, NodeOutput]
    """The entry of each parameter's gradient."""
    auxiliary: frozenset[str]

    @property
    def trains(self) -> bool:
        """Whether it has a backward."""
        return self.forward_count < len(self.nodes)


@dataclass
class _SymbolGraph:
    """Nodes in the order of their creation; ids are positions, in no order of execution."""

    nodes: list[Node]
    shapes: list[tuple[Shape, ...]]
    of: list[Operator | None]
    forward: list[int | None] = field(default_factory=list)

    def add(self, node: Node, shapes: tuple[Shape, ...], of: Operator | None, forward: int | None = None) -> int:
        self.nodes.append(node)
        self.shapes.append(shapes)
        self.of.append(of)
        self.forward.append(forward)
        return len(self.nodes) - 1


def training_step(symbol: Symbol, inputs: dict[str, Shape], *, trains: bool = True) -> MxnetStep:
    """Return the training step of `symbol` on `inputs`, or the forward alone without `trains`.

    Inputs alone have no gradients. Raises UnsupportedError for an unknown operator, and for a shape that cannot be
    inferred.
    """
    graph, auxiliary = _forward(symbol, inputs)
    parameters = [
        i for i, node in enumerate(symbol.nodes)
        if node.is_variable and node.name not in inputs and node.name not in auxiliary
    ]  # fmt: skip
    gradients = _gradients(graph, symbol, parameters) if trains else {}
    # Number the nodes in the order in which they run.
    order = list(_depth_first(graph.nodes, [*symbol.heads, *gradients.values()]))
    number = {old: new for new, old in enumerate(order)}

    def moved(entry: NodeOutput) -> NodeOutput:
        return NodeOutput(number[entry.node], entry.number)

    nodes = tuple(
        replace(
            graph.nodes[old],
            inputs=tuple(map(moved, graph.nodes[old].inputs)),
            controls=tuple(number[c] for c in graph.nodes[old].controls),
        )
        for old in order
    )
    return MxnetStep(
        nodes,
        tuple(graph.shapes[old] for old in order),
        tuple(graph.of[old] for old in order),
        tuple(None if graph.forward[old] is None else number[graph.forward[old]] for old in order),  # type: ignore[index]
        sum(old < len(symbol.nodes) for old in order),
        tuple(map(moved, symbol.heads)),
        {graph.nodes[parameter].name: moved(entry) for parameter, entry in gradients.items()},
        auxiliary,
    )


def _forward(symbol: Symbol, inputs: dict[str, Shape]) -> tuple[_SymbolGraph, frozenset[str]]:
    """Return the forward nodes with shapes, and names of auxiliary states.

    Operators infer the shapes of weights.
    """
    counts = Counter[int]()
    for entry in (*(entry for node in symbol.nodes for entry in node.inputs), *symbol.heads):
        counts[entry.node] = max(counts[entry.node], entry.number + 1)
    shapes: list[Shapes] = [
        [inputs.get(node.name, node.numbers("__shape__") or None)] if node.is_variable else [None] * counts[i]
        for i, node in enumerate(symbol.nodes)
    ]  # fmt: skip
    of = [None if node.is_variable else operator_of(node) for node in symbol.nodes]
    left = [i for i, operator in enumerate(of) if operator is not None]
    while left:
        # What must wait for a shape that a later operator infers is tried again.
        waiting = {i: error for i in left if (error := _infer(symbol, i, of[i], shapes)) is not None}
        if len(waiting) == len(left):
            raise next(iter(waiting.values()))
        left = list(waiting)
    auxiliary = {node.name for node in symbol.nodes if node.attrs.get(TRAINED) == "null"}
    for node, operator in zip(symbol.nodes, of, strict=True):
        states = () if operator is None else operator.auxiliary
        auxiliary |= {symbol.nodes[node.inputs[k].node].name for k in states if k < len(node.inputs)}
    whole = [
        tuple(known(node, row, k) for k in range(len(row))) for node, row in zip(symbol.nodes, shapes, strict=True)
    ]
    return _SymbolGraph(list(symbol.nodes), whole, of, [None] * len(of)), frozenset(auxiliary)


def _infer(symbol: Symbol, i: int, operator: Operator | None, shapes: list[Shapes]) -> UnsupportedError | None:
    """Infer the shapes of node `i` and of what it reads; return an error if one is not known yet."""
    node = symbol.nodes[i]
    if operator is None:
        return None
    read: Shapes = [shapes[entry.node][entry.number] for entry in node.inputs]
    operator.complete(node, read, shapes[i])
    made, error = None, None
    try:
        made = operator.infer(node, read)
    except UnsupportedError as unknown:
        error = unknown
    for entry, shape in zip(node.inputs, read, strict=True):
        shapes[entry.node][entry.number] = shape
    if made is not None and (node.inputs or None in shapes[i]):
        shapes[i] = list(made)
    return error


def _gradients(graph: _SymbolGraph, symbol: Symbol, parameters: Collection[int]) -> dict[int, NodeOutput]:
    """Add the nodes of backward to `graph`, and return the entry of each parameter's gradient."""
    order = list(_depth_first(graph.nodes, symbol.heads))
    found: dict[NodeOutput, list[NodeOutput]] = {}
    for head in symbol.heads:
        shape = graph.shapes[head.node][head.number]
        found[head] = [NodeOutput(graph.add(Node(VARIABLE, HEAD_GRADIENT), (shape,), None), 0)]
    for i in reversed(order):
        node, operator = graph.nodes[i], graph.of[i]
        if operator is None or operator.gradients == 0:
            continue
        # Sum the gradients of the node's outputs.
        above = [
            _sum(graph, found.get(NodeOutput(i, k), []), shape)
            for k, shape in enumerate(graph.shapes[i][: operator.visible])
        ]
        if not operator.backward:
            made = [above[0]] * len(node.inputs)
        elif not any(above) and "g" in operator.backward:
            continue  # nothing below the loss depends on it
        else:
            whole = [entry or _zeros(graph, i, k) for k, entry in enumerate(above)]
            made = _gradient_node(graph, i, operator, whole)
        # Pass the gradients on to the inputs.
        for entry, gradient in zip(node.inputs, made, strict=False):
            if gradient is not None:
                found.setdefault(entry, []).append(gradient)
    sums = {i: _sum(graph, found.get(NodeOutput(i, 0), []), graph.shapes[i][0]) for i in parameters}
    return _distinct(graph, {i: entry for i, entry in sums.items() if entry is not None})


def _gradient_node(graph: _SymbolGraph, i: int, operator: Operator, above: list[NodeOutput]) -> list[NodeOutput | None]:
    """Add the node that makes the gradients of node `i`'s inputs."""
    node = graph.nodes[i]
    read: list[NodeOutput] = []
    for what in operator.backward:
        if what == "g":
            read += above
        elif what[0] == "o":
            if int(what[1:]) < len(graph.shapes[i]):
                read.append(NodeOutput(i, int(what[1:])))
        elif int(what[1:]) < len(node.inputs):
            read.append(node.inputs[int(what[1:])])
    count = len(node.inputs) if operator.gradients is None else operator.gradients
    shapes = tuple(graph.shapes[entry.node][entry.number] for entry in node.inputs[:count])
    gradient = Node(f"_backward_{node.op}", f"{node.name}_backward", tuple(read), node.attrs, (i,))
    made = graph.add(gradient, shapes, operator, i)
    return [NodeOutput(made, k) for k in range(count)]


def _zeros(graph: _SymbolGraph, i: int, k: int) -> NodeOutput:
    """Return an entry of zeros: the gradient of output `k` of node `i`, which nothing reads."""
    shape = graph.shapes[i][k]
    node = Node("_zeros", "zeros", attrs={"shape": str(shape)})
    return NodeOutput(graph.add(node, (shape,), operator_of(node)), 0)


def _sum(graph: _SymbolGraph, parts: list[NodeOutput], shape: Shape) -> NodeOutput | None:
    """Return one entry for the sum of `parts`.

    It is the part itself, a sum of few, or a chain of sums that backward adds into one storage.
    """
    if len(parts) < 2:
        return parts[0] if parts else None
    if len(parts) < INPLACE_SUM_CAP:
        node = Node("ElementWiseSum", "sum_grad", tuple(parts))
        return NodeOutput(graph.add(node, (shape,), operator_of(node)), 0)
    total = parts[0]
    for before, part in pairwise(parts):
        if before.node != part.node:
            later = graph.nodes[part.node]
            graph.nodes[part.node] = replace(later, controls=(*later.controls, total.node))
        node = Node("_grad_add", "sum_grad", (total, part))
        total = NodeOutput(graph.add(node, (shape,), operator_of(node)), 0)
    node = Node("_copy", "sum_grad_final", (total,))
    return NodeOutput(graph.add(node, (shape,), operator_of(node)), 0)


def _distinct(graph: _SymbolGraph, gradients: dict[int, NodeOutput]) -> dict[int, NodeOutput]:
    """Copy a gradient shared by two parameters for the second."""
    taken: set[NodeOutput] = set()
    for i, entry in gradients.items():
        if entry in taken:
            node = Node("_copy", f"{graph.nodes[entry.node].name}_copy", (entry,))
            gradients[i] = NodeOutput(graph.add(node, (graph.shapes[i][0],), operator_of(node)), 0)
        taken.add(gradients[i])
    return gradients


def _depth_first(nodes: list[Node], heads: Collection[NodeOutput] | list[NodeOutput]) -> Iterator[int]:
    """Yield the nodes behind `heads`, in depth-first order.

    Each follows the nodes that it reads or waits for, in the order of `DFSVisit`.
    """
    seen: set[int] = set()
    for head in heads:
        stack: list[tuple[int, Iterator[int]]] = []
        if head.node not in seen:
            seen.add(head.node)
            stack.append((head.node, _before(nodes[head.node])))
        while stack:
            node, rest = stack[-1]
            following = next((before for before in rest if before not in seen), None)
            if following is None:
                stack.pop()
                yield node
            else:
                seen.add(following)
                stack.append((following, _before(nodes[following])))


def _before(node: Node) -> Iterator[int]:
    yield from (entry.node for entry in node.inputs)
    yield from node.controls
