"""Guards: the values that a captured step read, and a test whether they changed.

The ops that lead to these values are a small *guard program*, an FX graph on the step's input tensors. It runs before
each later step: equal values mean that the plan is still valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from overspill.pytorch.dispatch import DisableAutocast
from overspill.pytorch.trees import tree_leaves

DRAWS = "overspill_draws"
"""Key in the meta of a node that draws random numbers; the graph has draws in their order."""
Answer = tuple[Any, ...]
"""The values that one read gave, each by its `word`."""


@dataclass(frozen=True)
class Question:
    """One read of a value."""

    node: fx.Node
    """The node whose value was read."""
    answer: Answer
    place: str
    """The user's line that read it."""


@dataclass(frozen=True)
class Guards:
    """The guard program of a captured step, with the answers it was captured with."""

    program: fx.GraphModule | None = None
    takes: tuple[int, ...] = ()
    """Positions of its inputs among the step's input tensors."""
    answers: tuple[Answer, ...] = ()
    places: tuple[str, ...] = ()
    """For each answer, the user's line that read it."""
    nbytes: int = 0
    """The peak bytes that the program takes besides its inputs."""
    draws: bool = False
    """Whether the program draws random numbers."""

    @classmethod
    def of(cls, graph: fx.Graph, constants: Mapping[str, Tensor], questions: Sequence[Question]) -> Guards:
        """Return guards for those `questions` about `graph` whose answers can change from step to step."""
        needed = needed_for(graph, (question.node for question in questions))
        open_ = _followers(graph, needed)
        asked = list({q.node: q for q in questions if q.node in open_}.values())
        if not asked:
            return cls()
        needed = needed_for(graph, (question.node for question in asked))
        # Copy the needed nodes into a program of their own, with its constants as buffers.
        program = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            if node in needed:
                copies[node] = program.node_copy(node, copies.__getitem__)
        program.output([copies[question.node] for question in asked])
        root = nn.Module()
        for node in program.find_nodes(op="get_attr"):
            root.register_buffer(str(node.target), constants[str(node.target)], persistent=False)
        takes = tuple(n.meta["position"] for n in program.find_nodes(op="placeholder"))
        module = fx.GraphModule(root, program)
        answers, places = tuple(q.answer for q in asked), tuple(q.place for q in asked)
        return cls(module, takes, answers, places, _peak_bytes(program), any(DRAWS in n.meta for n in needed))

    def difference(self, given: Sequence[Tensor]) -> str | None:
        """Return the first line with another answer for the tensors `given`, or None."""
        if self.program is None:
            return None
        generator = drawing(torch.get_rng_state()) if self.draws else nullcontext()
        with torch.no_grad(), DisableAutocast(), generator:
            try:
                values = self.program.forward(*(given[position] for position in self.takes))
            except (RuntimeError, IndexError):
                # Another answer may have led the step elsewhere; a capture of its own then reports any error.
                return self.places[0]
            found = _answers(values)
        return next((place for place, a, b in zip(self.places, self.answers, found, strict=True) if a != b), None)


def word(value: Any) -> Any:
    """Return a comparable form of a value: a scalar's exact bits, or a tensor's shape."""
    if isinstance(value, Tensor):
        if value.dim():
            return tuple(value.shape)
        value = value.item()
    if isinstance(value, complex):
        return value.real.hex(), value.imag.hex()
    return value.hex() if isinstance(value, float) else int(value)


def _answers(values: Iterable[Any]) -> list[Answer]:
    """Return the answers, as words; scalars on another device are fetched in one transfer."""
    answers = [tree_leaves(value) for value in values]
    scalars = [leaf for answer in answers for leaf in answer if isinstance(leaf, Tensor) and not leaf.dim()]
    if any(not scalar.is_cpu for scalar in scalars):
        here = dict(zip(map(id, scalars), _transferred(scalars), strict=True))
        answers = [[here.get(id(leaf), leaf) for leaf in answer] for answer in answers]
    return [tuple(map(word, answer)) for answer in answers]


def _transferred(scalars: Sequence[Tensor]) -> list[Tensor]:
    """Return the scalars, copied to the CPU at once."""
    packed = torch.cat([scalar.reshape(1).view(torch.uint8) for scalar in scalars]).cpu()
    parts = packed.split([scalar.element_size() for scalar in scalars])
    return [part.clone().view(scalar.dtype)[0] for part, scalar in zip(parts, scalars, strict=True)]


@contextmanager
def drawing(state: Tensor) -> Iterator[Tensor]:
    """Let the CPU generator draw from `state` inside the block, which advances it.

    The generator itself is restored.
    """
    before = torch.get_rng_state()
    torch.set_rng_state(state)
    try:
        yield state
    finally:
        state.copy_(torch.get_rng_state())
        torch.set_rng_state(before)


def needed_for(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes that must run to compute `nodes`, with all earlier random draws."""
    found = _ancestors(nodes)
    draws = [node for node in graph.nodes if DRAWS in node.meta]
    last = max((i for i, node in enumerate(draws) if node in found), default=-1)
    return found | _ancestors(draws[: last + 1])


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    pending = list(nodes)
    found = set(pending)
    for node in pending:  # it grows
        new = [n for n in node.all_input_nodes if n not in found]
        found.update(new)
        pending += new
    return found


def _followers(graph: fx.Graph, among: set[fx.Node]) -> set[fx.Node]:
    """Return those of `among` whose value may differ in the next step."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node in among and (
            node.op != "call_function" or DRAWS in node.meta or not found.isdisjoint(node.all_input_nodes)
        ):
            found.add(node)
    return found


def _peak_bytes(graph: fx.Graph) -> int:
    """Return the peak live bytes while `graph` runs, besides its inputs; a view keeps its base alive."""
    last = {source: position for position, node in enumerate(graph.nodes) for source in node.all_input_nodes}
    live: dict[fx.Node, int] = {}
    most = 0
    for position, node in enumerate(graph.nodes):
        views = [source for source in node.all_input_nodes if not node.meta.get("nbytes")]
        for source in views:
            last[source] = max(last[source], last.get(node, position))
        live[node] = node.meta.get("nbytes", 0)
        most = max(most, sum(live.values()))
        live = {n: size for n, size in live.items() if last.get(n, -1) > position}
    return most
