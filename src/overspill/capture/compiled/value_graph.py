"""Record how tensors of a traced step follow from its inputs, buffers and constants; compute only requested values.

Known limits: a tensor is known by the op that made it. One that was written in place is unknown from then on. Tensors
that follow from parameters are unknown too, and so are random numbers of a generator other than the CPU's.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from overspill.core.errors import UnsupportedError
from overspill.pytorch.dispatch import DisableAutocast, disable_current_modes, no_python_dispatcher, schema_of
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.storages import storage_key
from overspill.pytorch.symbols import is_symbolic
from overspill.pytorch.trees import tree_leaves, tree_map_only

from .guards import DRAWS, Guards, Question, drawing, needed_for, word
from .joint import call_draws

aten = torch.ops.aten
_EMPTY = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_OF_FIXED_COUNT = frozenset(
    getattr(aten, name)
    for name in (
        "rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "randperm", "bernoulli", "uniform",
        "normal", "normal_functional", "exponential", "random", "native_dropout", "bernoulli_", "uniform_", "normal_",
        "exponential_", "random_",
    )
)  # fmt: skip
"""Ops whose number of draws does not depend on the values of their tensors."""


class Held(UnsupportedError):
    """Raised if a step reads one of the model's tensors other than through the model."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the step reads {name} by a reference that was taken outside of it, where it is not followed; take it "
            "from the model, in the step: model.get_parameter(…), dict(model.named_parameters())"
        )


class ValueGraph:
    """The known tensors of one pass over a step, with the node that makes each, and the questions about them."""

    def __init__(self, own: Mapping[int, str], *, knows_draws: bool) -> None:
        """Make a graph without tensors.

        `own` has the names of the model's real tensors by their ids. If `knows_draws`, random numbers may be known.
        """
        self._graph = fx.Graph()
        self._own = own
        self._knows_draws = knows_draws
        self._nodes: dict[int, tuple[Any, fx.Node]] = {}
        """For each known tensor, by its id, the tensor and the node that makes it. Kept tensors keep their ids."""
        self._changed: set[int] = set()
        self._external: set[int] = set()
        self._drawn: Tensor | None = None
        self._values: dict[fx.Node, Any] = {}
        self._questions: list[Question] = []
        self.constants: dict[str, Tensor] = {}
        """Real tensors that the step read by reference, neither the model's nor inputs."""

    def add_input(self, fake: FakeTensor, real: Tensor, position: int) -> None:
        """Let `fake` have the values of `real`, the input at `position`."""
        node = self._graph.placeholder(f"given_{position}")
        node.meta = {"position": position, "nbytes": 0}
        self._nodes[id(fake)] = fake, node
        self._values[node] = real

    def guards(self) -> Guards:
        """Return guards for the questions, in order."""
        return Guards.of(self._graph, self.constants, self._questions)

    def is_external(self, tensor: Tensor) -> bool:
        """Return whether `tensor` is a real tensor or a view of one."""
        return not isinstance(tensor, FakeTensor) or storage_key(tensor) in self._external

    # -- how known tensors are made

    def note(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any, *, inside: bool) -> None:
        """Record how `made` is computed, if it follows from known tensors; `inside`: by another op's fake kernel."""
        if (draws := call_draws(func, args, kwargs)) and not inside:
            self._note_draw(func, args, kwargs, made)
            if self._knows_draws:
                return
        if schema_of(func).is_mutable:
            # Nodes are of ops that change nothing; traced programs have hardly any others.
            self._changed.update(storage_key(t) for t in _tensors(args, kwargs) if isinstance(t, FakeTensor))
            return
        if draws or (inside and func.overloadpacket in _EMPTY):  # an empty tensor there stands for a result
            return
        # Only tensors are followed; views of real tensors stay external.
        results = [r for r in (made if isinstance(made, (list, tuple)) else (made,)) if isinstance(r, FakeTensor)]
        if not results or any(map(is_symbolic, results)):
            return
        views = func.is_view and func is not aten.lift_fresh.default
        if views and any(map(self.is_external, _tensors(args, kwargs))):
            self._external.update(map(storage_key, results))
        if (node := self.call(func, args, kwargs)) is not None:
            self._made_by(node, made, args, kwargs)

    def call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node | None:
        """Return a node that calls `func` on known tensors, or None if one of them is not known."""
        nodes = {id(t): self.node_of(t) for t in _tensors(args, kwargs)}
        if None in nodes.values():
            return None
        args, kwargs = tree_map_only(Tensor, lambda t: nodes[id(t)], (tuple(args), dict(kwargs)))
        node = self._graph.call_function(func, args, kwargs)
        node.meta = {"nbytes": 0}
        return node

    def node_of(self, tensor: Tensor) -> fx.Node | None:
        """Return the node of a known tensor, or None for any other.

        A real tensor, which the step reads by reference, is a constant. Its value is read again at each step.
        """
        if isinstance(tensor, FakeTensor):
            _, node = self._nodes.get(id(tensor), (None, None))
            return None if node is None or (self._changed and storage_key(tensor) in self._changed) else node
        if name := self._own.get(id(tensor), ""):
            raise Held(name)
        if id(tensor) not in self._nodes:
            name = f"constant_{len(self.constants)}"
            self.constants[name] = tensor
            node = self._graph.get_attr(name)
            node.meta = {"nbytes": 0}
            self._nodes[id(tensor)] = tensor, node
            self._values[node] = tensor
        return self._nodes[id(tensor)][1]

    def _made_by(self, node: fx.Node, made: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record that `node` makes `made`, and how many new bytes that is; views of its arguments have none."""
        results = made if isinstance(made, (list, tuple)) else (made,)
        known = {storage_key(t) for t in _tensors(args, kwargs)}
        new = [r for r in results if isinstance(r, FakeTensor) and storage_key(r) not in known]
        node.meta["nbytes"] = sum(int(r.untyped_storage().nbytes()) for r in new)
        if results is not made:
            self._nodes[id(made)] = made, node
            return
        for i, result in enumerate(results):
            if isinstance(result, FakeTensor):
                item = self._graph.call_function(operator.getitem, (node, i))
                item.meta = {"nbytes": 0}
                self._nodes[id(result)] = result, item

    def _note_draw(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
        """Record a draw of the CPU's generator, and its result if that is known."""
        if any(not tensor.is_cpu for tensor in _tensors(args, kwargs, made)):
            return
        self._knows_draws &= func.overloadpacket in _OF_FIXED_COUNT and kwargs.get("generator") is None
        self._knows_draws &= not any(map(is_symbolic, _tensors(args, kwargs, made)))  # as many as rows are chosen
        if not self._knows_draws:
            return
        # Later draws depend on this one, so it is recorded even if its arguments are unknown.
        nodes = {id(t): self.node_of(t) for t in _tensors(args, kwargs)}
        is_known = None not in nodes.values()
        args_, kwargs_ = tree_map_only(Tensor, lambda t: nodes[id(t)] or self._blank(t), (tuple(args), dict(kwargs)))
        node = self._graph.call_function(func, args_, kwargs_)
        node.meta = {DRAWS: True}
        self._made_by(node, made if is_known else (), args, kwargs)
        node.meta["nbytes"] = sum(t.nbytes for t in _tensors(made))

    def _blank(self, tensor: Tensor) -> fx.Node:
        """Return a node for a tensor like `tensor`, with arbitrary values."""
        like = {"dtype": tensor.dtype, "device": tensor.device}
        node = self._graph.call_function(torch.empty_strided, (tuple(tensor.shape), tensor.stride()), like)
        node.meta = {"nbytes": tensor.nbytes}
        return node

    # -- values

    def ask(self, node: fx.Node, place: str) -> Any:
        """Return the real value of `node`, recorded as a question for later steps of the user's line `place`."""
        with for_real():
            value = self.value(node)
            answer = tuple(map(word, tree_leaves(value)))
        self._questions.append(Question(node, answer, place))
        return value

    def value(self, node: fx.Node) -> Any:
        """Return the real value of `node`, computed with everything that it depends on."""
        if self._drawn is None:
            self._drawn = torch.get_rng_state()
        needed = needed_for(self._graph, [node])
        with drawing(self._drawn):
            for one in self._graph.nodes:
                if one in needed and one not in self._values:
                    args, kwargs = fx.node.map_arg((one.args, one.kwargs), self._values.__getitem__)
                    self._values[one] = one.target(*args, **kwargs)
        return self._values[node]


@contextmanager
def for_real() -> Iterator[None]:
    """Compute ops for real inside the block, whatever is being traced."""
    with disable_current_modes(), no_python_dispatcher(), torch.no_grad(), DisableAutocast():
        yield


def _tensors(*values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
