"""Trace a whole training step to a joint forward-backward graph with AOTAutograd.

The step is traced on fake tensors: nothing is computed. It is a function of its parameters and buffers; backward starts
from ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn

from overspill.capture.frames import stack_within
from overspill.capture.programs.checkpoints import checkpoints_marked
from overspill.core.errors import UnsupportedError
from overspill.pytorch.aot import aot_export_joint_with_descriptors, exported_graph
from overspill.pytorch.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FunctionalTensor,
    is_functional,
)
from overspill.pytorch.trees import tree_leaves

from .backward import ONE_SIZE, Backward, NeedsPlainBackward
from .casts import Casts
from .checks import Checks
from .effects import output_descs, without_tokens
from .joint import JointGraph
from .kernels import eager_kernels
from .known_values import ChangesExternalTensor, KnownValues, UnknownValue, where
from .layer_calls import layers_noted
from .lines import lines_noted


def joint_of_step(
    step: Callable[..., Tensor | tuple[Tensor, ...]],
    module: nn.Module,
    values: Sequence[FakeTensor],
    backward: Backward,
    named: Callable[[str], str] = str,
    checks: Checks | None = None,
) -> JointGraph:
    """Return the joint graph of forward and backward of `step(*values)`; backward starts from the loss.

    `backward` checks its gradients. Nodes carry their layer in `module`, whose path `named` turns into a name. `checks`
    finds the step's checks of values that are not known yet; the graph makes these checks. Raises UnsupportedError for
    a step that is not a fixed graph, or has nothing to differentiate.
    """
    checks = checks or Checks()
    sizes = [value.shape for value in values]
    with layers_noted(module, named), lines_noted(), _explained(), eager_kernels() as casts:
        # Trace again after each read of an unknown value that turns out to be a check.
        graph_module: fx.GraphModule | None = None
        while graph_module is None:
            try:
                graph_module = _heard(partial(checks.followed, step), values, backward, casts)
            except UnknownValue as asked:
                checks.decide(asked, step, values)
        if isinstance(mode := values[0].fake_mode, KnownValues) and mode.rows is not None:
            mode.rows.bound(graph_module, mode)
    # Clean up the graph, and make sure that there is something to differentiate.
    without_tokens(graph_module.graph)
    checks.put_into(graph_module.graph)
    descs = output_descs(graph_module.graph)
    gradients = sum(type(desc).__name__ == "GradAOTOutput" for desc in descs)
    forward_outputs = sum(desc is not None for desc in descs) - gradients  # an input without gradient has none
    if not gradients:
        raise UnsupportedError(
            "no parameter gets a gradient: the loss depends on none that requires one; compute it from what the model "
            "returns, and freeze less"
        )
    _seed_backward(graph_module.graph)
    joint = JointGraph(graph_module, forward_outputs)
    backward.check(joint, (i for i, value in enumerate(values) if value.shape != sizes[i]))
    return joint


def _heard(step: Callable[..., Any], values: Sequence[FakeTensor], backward: Backward, casts: Casts) -> fx.GraphModule:
    """Return the joint graph as traced; where the trace cannot, plain autograd shows which inputs get gradients."""
    try:
        return _exported(step, values, backward, casts)
    except NeedsPlainBackward:
        backward.ask(step, values)
        return _exported(step, values, backward, casts)


def _exported(
    step: Callable[..., Any], values: Sequence[FakeTensor], backward: Backward, casts: Casts
) -> fx.GraphModule:
    with (
        ExitStack() as stack,
        backward.followed(casts),
        checkpoints_marked(),
        patch.object(FunctionalTensor, "data", _Data(), create=True),
    ):
        exported = aot_export_joint_with_descriptors(stack, _Function(backward.traced(step)), tuple(values))
        graph_module: fx.GraphModule = exported_graph(exported)
    return graph_module


class _Data:
    """Replaces `.data` of traced tensors, whose assignment a trace would not follow."""

    def __get__(self, tensor: Tensor, _: Any) -> Tensor:
        data: Tensor = torch.Tensor.data.__get__(tensor)
        return data

    def __set__(self, tensor: Tensor, value: Tensor) -> None:
        place = where(stack_within(sys._getframe(1)))
        raise UnsupportedError(f"the step assigns the data of a tensor{place}; change it in place, with copy_()")


_KEPT = ("Unexpected fake", " in tensor_tracker")  # from 2.13 on, and before
"""Words in tracers' errors about a fake tensor of an earlier trace."""


@contextmanager
def _explained() -> Iterator[None]:
    """Turn tracer errors about values and kept tensors into UnsupportedError; the model's own pass through."""
    try:
        yield
    except (AssertionError, DataDependentOutputException, DynamicOutputShapeException, RuntimeError) as error:
        if any(sign in str(error) for sign in _KEPT):
            raise UnsupportedError(
                "the step's Python keeps a tensor that it makes at its first call, as a GradScaler its scale, and a "
                "planned step would make it once, not at every step; make it before the step and change it in place, "
                "with copy_(), and for float16 with a GradScaler use overspill.compile"
            ) from error
        if isinstance(error, AssertionError):
            raise
        # Name the innermost line outside torch and Overspill.
        frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(_OWN_CODE)]
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        if changes_external_tensors(error):
            raise ChangesExternalTensor(place) from error
        if "resize a view tensor to a larger size" in str(error):  # so functionalization has all inputs
            raise UnsupportedError(f"the model's forward resizes a tensor{place}; {ONE_SIZE}") from error
        lacks_kernel = isinstance(error, NotImplementedError) and "no data" not in str(error)
        if lacks_kernel or (type(error) is RuntimeError and ".numpy()" not in str(error)):
            raise
        raise UnknownValue(place) from error


def changes_external_tensors(error: Exception) -> bool:
    """Return whether a trace failed on an in-place change of an unknown tensor."""
    return isinstance(error, ChangesExternalTensor) or "mutating a non-functional tensor" in str(error)


def is_traced(tensor: Tensor) -> bool:
    """Return whether `tensor` belongs to a trace."""
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or is_functional(tensor)


_OWN_CODE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]), "<")


class _Function(nn.Module):
    """Wraps a plain function as a module without parameters, which AOTAutograd requires."""

    def __init__(self, function: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        super().__init__()
        self._function = function

    def __call__(self, *values: Tensor) -> tuple[Tensor, ...]:  # hooks of all modules are not for this one
        return self.forward(*values)

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        returned = self._function(*values)
        loss, *others = returned if isinstance(returned, tuple) else (returned,)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UnsupportedError(f"the loss is {what}; a training step needs a scalar loss (take its mean or sum)")
        return loss, *others


def returned(graph: fx.Graph) -> list[fx.Node]:
    """Return the nodes of the loss and of the step's other results, in order.

    Raises UnsupportedError for results that are no tensors.
    """
    outputs = tree_leaves(graph.find_nodes(op="output")[0].args)
    found = [n for n, d in zip(outputs, output_descs(graph), strict=True) if type(d).__name__ == "PlainAOTOutput"]
    if not found or not all(isinstance(node, fx.Node) for node in found):
        raise UnsupportedError(
            "the step returns something else than its loss; return that, or a tuple of it and of other tensors"
        )
    return found


def _seed_backward(graph: fx.Graph) -> None:
    """Replace the loss's gradient, an input of the graph, by ones as in `loss.backward()`."""
    tangents = [n for n in graph.find_nodes(op="placeholder") if "tangents" in str(n.target)]
    loss, *_ = returned(graph)
    for tangent in tangents:
        if tangent.users:
            first = next(n for n in graph.nodes if tangent in n.all_input_nodes)
            with graph.inserting_before(first):
                seed = graph.call_function(torch.ops.aten.ones_like.default, (loss,))
            seed.meta = {"val": tangent.meta["val"], "partitioner_tag": "is_backward"}
            tangent.replace_all_uses_with(seed)
        graph.erase_node(tangent)
