"""Gradients that autograd passes to backward: some None, some with other strides.

AOTAutograd replaces None by zeros, and passes zeros on where eager passes None. An optimizer would then make state for
parameters that it ignores in eager, and weight decay would change them. So here too, gradients that depend only on None
are None.

AOTAutograd also copies a gradient into the strides that backward was traced for, those of the output. Kernels whose
rounding depends on the order of their input would then differ from eager. So would kernels after a sum with such zeros.
So for gradients of other strides, or None, backward is traced again, and follows the first plan as far as possible.

A model that returns its loss, and the logits that it made it from, is planned without gradients of the logits: zeros
would take as much memory as the logits do. If they get gradients after all, backward is traced again, and the model
planned again.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from overspill.capture.compiled.effects import is_token
from overspill.capture.compiled.joint import ABSENT, JointGraph
from overspill.core.errors import UnsupportedError
from overspill.pytorch.aot import collect_metadata_analysis
from overspill.pytorch.fake_tensors import FakeTensorMode, detect_fake_mode

Layout = tuple[tuple[int, ...] | None, ...]
"""Strides of the gradients of a graph's outputs, in their order; None where the gradient is None."""


class _Given(threading.local):
    """Gradients for the next backward in this thread, one per output."""

    gradients: Sequence[Any] = ()


_GIVEN = _Given()


def begin_backward(given: Sequence[Any]) -> None:
    """Store the gradients `given` to the backward that is about to run."""
    _GIVEN.gradients = given


def without_outputs_of_loss(joint: JointGraph) -> JointGraph:
    """Return `joint` without gradients of the outputs that it makes into a loss itself."""
    numbers = [number for number, output in enumerate(joint.differentiable) if output in joint.made_into_loss]
    if not numbers or len(joint.differentiable) < len(joint.tangents):
        return joint
    without_absent(joint.module, numbers)
    return JointGraph(joint.module, len(joint.forward_outputs))


class JointGradients:
    """Gradients that the backward of a joint graph takes and returns.

    For each gradient that it returns, it knows the outputs whose gradients that one depends on.
    """

    def __init__(self, joint: JointGraph) -> None:
        tangents = [tangent for tangent in joint.tangents if not is_token(tangent.meta["desc"])]
        self.can_differ = len(tangents) == len(joint.tangents)
        """Whether backward can get None, and other strides."""
        self._outputs = list(joint.differentiable)
        self._tangents = tangents
        # Propagate through the graph which outputs' gradients each node depends on.
        follows: dict[fx.Node, frozenset[int]] = {
            tangent: frozenset({output}) for tangent, output in zip(tangents, self._outputs, strict=True)
        }
        for node in joint.module.graph.nodes:
            follows.setdefault(node, frozenset().union(*(follows[n] for n in node.all_input_nodes)))
        self._follow = [follows.get(output, frozenset()) for output in joint.backward_outputs]

    @cached_property
    def _layout(self) -> Layout:
        """The strides that backward was traced for; known once it is planned."""
        return tuple(None if ABSENT in t.meta else t.meta["val"].stride() for t in self._tangents)

    def given(self) -> tuple[dict[int, Tensor], Layout | None]:
        """Return the gradients of this backward by input number, and their strides if not the traced ones."""
        given, _GIVEN.gradients = _GIVEN.gradients, ()
        self._absent = frozenset(i for i, gradient in enumerate(given) if gradient is None)
        there = {i: given[output] for i, output in enumerate(self._outputs) if given and given[output] is not None}
        layout = tuple(there[i].stride() if i in there else None for i in range(len(self._outputs)))
        return there, layout if given and self.can_differ and layout != self._layout else None

    def are_more(self, layout: Layout) -> bool:
        """Return whether this layout has gradients that backward was planned without."""
        return any(there is not None and none is None for there, none in zip(layout, self._layout, strict=True))

    def fill(self, args: list[Any], given: Mapping[int, Tensor]) -> None:
        """Put zeros for absent gradients into the arguments of the planned backward.

        Raises UnsupportedError for a gradient that it was planned without.
        """
        first = len(args) - len(self._tangents)
        for number, tangent in enumerate(self._tangents):
            if ABSENT in tangent.meta:
                if number in given:
                    raise UnsupportedError(
                        f"output {self._outputs[number]} of the model got a gradient besides the loss that the model "
                        "returns, and backward was planned without it: pass reserve=, with the bytes of the loss "
                        "outside of the model"
                    )
            elif args[first + number] is None:
                value = tangent.meta["val"]
                zeros = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
                args[first + number] = zeros.zero_()

    def of(self, made: Sequence[Any]) -> list[Any]:
        """Return the results of backward, with None if every gradient that one depends on was None."""
        return [None if why and why <= self._absent else one for one, why in zip(made, self._follow, strict=True)]


def fake_examples(examples: Sequence[Any]) -> list[Any]:
    """Return `examples` as fake tensors, for another trace."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    return [mode.from_tensor(e, static_shapes=True) if isinstance(e, Tensor) else e for e in examples]


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Make AOTAutograd trace backward for gradients of these strides, within the context."""
    name, strides = "coerce_tangent_and_suggest_memory_format", iter(layout)
    plain = getattr(collect_metadata_analysis, name)

    def as_given(x: Any) -> Any:
        # The first calls are for the gradients, in their order; those that follow describe them.
        if (stride := next(strides, None)) is None or not isinstance(x, Tensor):
            return plain(x)
        found = torch.empty_strided(x.shape, stride, dtype=x.dtype, device=x.device)
        return found, plain(found)[1], True

    with patch.object(collect_metadata_analysis, name, as_given):
        yield


def without_absent(joint: fx.GraphModule, absent_tangents: Container[int]) -> None:
    """Remove sums with absent gradients from `joint`, as autograd does.

    `absent_tangents` are numbers of tangents. Ops that also read other gradients get zeros. Nodes that depend on the
    remaining summand get new metadata: their strides may differ, and they may be views of it.
    """
    tangents = [n for n in joint.graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
    absent = {tangent for number, tangent in enumerate(tangents) if number in absent_tangents}
    if not absent:
        return
    for tangent in absent:
        tangent.meta[ABSENT] = True
    follows, others = set(tangents), set[fx.Node]()
    # A node is absent if all its gradients are; a sum with one absent is its other summand.
    for node in list(joint.graph.nodes):
        given = [n for n in node.all_input_nodes if n in follows]
        if not given or node.op == "output":
            continue
        follows.add(node)
        if absent.issuperset(given):
            absent.add(node)
        elif node.target is torch.ops.aten.add.Tensor and not node.kwargs and absent.intersection(given):
            others.add(other := next(n for n in given if n not in absent))
            node.replace_all_uses_with(other)
            continue
        for gone in filter(absent.__contains__, given):
            node.replace_input_with(gone, _zeros(gone, node))
        if others.intersection(given):
            others.add(node)
            _describe(node)
    # The gradients that depend only on absent ones are None.
    output = joint.graph.find_nodes(op="output")[0]
    output.args = fx.node.map_arg(output.args, lambda n: None if n in absent else n)


def _zeros(absent: fx.Node, before: fx.Node) -> fx.Node:
    """Return zeros in place of the gradient `absent`, inserted right `before` their reader, as autograd does."""
    value = absent.meta["val"]
    with before.graph.inserting_before(before):
        made = before.graph.call_function(
            torch.ops.aten.zeros.default, ([*value.shape],), {"dtype": value.dtype, "device": value.device}
        )
    made.meta = {"partitioner_tag": "is_backward"}
    with value.fake_mode:
        made.meta["val"] = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    return made


def _describe(node: fx.Node) -> None:
    """Recompute the fake value of the node from its present inputs.

    A view that their strides do not allow becomes a reshape, which copies, as in eager.
    """
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with detect_fake_mode([args, kwargs]) or nullcontext():
        try:
            node.meta["val"] = node.target(*args, **kwargs)
        except (RuntimeError, ValueError):
            if node.target is not torch.ops.aten.view.default:
                raise
            node.target = torch.ops.aten.reshape.default
            node.meta["val"] = node.target(*args, **kwargs)


def takes_what_is_saved(
    backward: fx.GraphModule,
    again: fx.GraphModule,
    forward: fx.GraphModule,
    outputs: int,
    ends: tuple[int | None, int | None] = (None, None),
) -> bool:
    """Make `backward` take all tensors that `forward` saves after its `outputs`; return whether it can.

    What `again` and `forward` return from the positions `ends` on is not for backward.

    Its own forward, `again`, may save fewer. False if the two do not call the same ops on the same arguments, or
    `backward` needs more than is saved.
    """

    def spelled(module: fx.GraphModule) -> list[Any]:
        return [(n.op, str(n.target), str(n.args), str(n.kwargs)) for n in module.graph.nodes if n.op != "output"]

    def returned(module: fx.GraphModule) -> list[str]:
        return [str(value) for value in module.graph.find_nodes(op="output")[0].args[0]]

    theirs, ours = returned(forward)[: ends[1]], returned(again)[: ends[0]]
    if spelled(again) != spelled(forward) or ours[:outputs] != theirs[:outputs]:
        return False
    # Its inputs in the order of what is saved, which follows from the order of backward's ops.
    needed, saved_before = ours[outputs:], theirs[outputs:]
    if Counter(needed) - Counter(saved_before):
        return False
    placeholders = backward.graph.find_nodes(op="placeholder")
    takes, tangent = defaultdict[str, list[fx.Node]](list), placeholders[len(needed)]
    for name, node in zip(needed, placeholders, strict=False):
        takes[name].append(node)
    for saved in saved_before:
        if takes[saved]:
            tangent.prepend(takes[saved].pop())
        else:
            with backward.graph.inserting_before(tangent):
                backward.graph.placeholder(f"unused_{saved}")
    backward.recompile()
    return True
