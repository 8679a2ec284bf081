"""Trace a module's training step to a joint graph with Dynamo and AOTAutograd.

The step is traced on fake tensors: nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, fx, nn

from overspill.capture.layers import readable_path
from overspill.core import TensorKind
from overspill.core.errors import OverspillError, UnsupportedError
from overspill.core.garbage import deep_calls
from overspill.core.progress import progress
from overspill.core.user_code import follows_values, is_graph_break, no_single_graph, place_in
from overspill.pytorch.aot import aot_autograd
from overspill.pytorch.dynamo import Unsupported, dynamo_config, reset_dynamo
from overspill.pytorch.storages import is_view

from .casts import Casts
from .graph import Captured, InputInfo, Surroundings, capture
from .joint import JointGraph
from .kernels import eager_kernels
from .known_values import UnknownValue
from .pieces import in_pieces


class DynamoGraph(NamedTuple):
    """The graph of a step as Dynamo traces it."""

    module: fx.GraphModule
    examples: Sequence[Any]
    """The graph's inputs, by position."""
    inputs: list[InputInfo]
    """Kind and readable name of each input."""


class JointOfStep(NamedTuple):
    """The joint graph of a step as AOTAutograd traces it."""

    joint: JointGraph
    examples: Sequence[Any]
    """The inputs of Dynamo's graph, by position."""
    inputs: list[InputInfo]
    """Kind and readable name of each input."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters among the inputs."""
        return [example for example in self.examples if isinstance(example, nn.Parameter)]


class _Traced(BaseException):
    """Raised to end Dynamo's or AOTAutograd's work once it has made a graph; Dynamo would catch an Exception."""


@deep_calls
def dynamo_graph(step: Callable[..., Any], batch: Sequence[Any]) -> DynamoGraph | None:
    """Return the graph of `step(*batch)`, or None if it has no ops.

    Tensors are fake, inside their mode. Raises UnsupportedError if the step is not a single graph, and Dynamo's errors.
    """
    found: list[DynamoGraph] = []
    progress("capturing the model")

    def keep(module: fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        found.append(DynamoGraph(module, examples, describe_inputs(module, examples)))  # their sources go at the end
        raise _Traced

    try:
        with dynamo_config.patch(allow_rnn=True), suppress(_Traced):
            torch.compile(step, backend=keep, dynamic=False, fullgraph=True)(*batch)
    except Exception as error:
        if follows_values(error) or (isinstance(error, Unsupported) and is_graph_break(error)):
            raise UnsupportedError(no_single_graph(error)) from error
        raise
    finally:
        reset_dynamo()  # Dynamo keeps what it compiled, and refuses the same class after some of them
    return found[0] if found else None


@deep_calls
def trace(step: nn.Module, batch: tuple[Tensor, ...]) -> JointOfStep:
    """Return the joint graph of one training step; `step(*batch)` returns the loss.

    Call this with a module and a batch of fake tensors, inside their FakeTensorMode: nothing is compiled or run. Raises
    OverspillError if nothing requires a gradient or the module is not a single graph, and Dynamo's other errors.
    """
    found: list[JointGraph] = []

    def partition(joint: fx.GraphModule, _values: Any, *, num_fwd_outputs: int, **_options: Any) -> NoReturn:
        found.append(JointGraph(joint, num_fwd_outputs))
        raise _Traced

    # Let AOTAutograd trace backward; its partition hands over the joint graph. Nothing is split, compiled or run.
    if (traced := dynamo_graph(step, batch)) is not None:
        module, examples, inputs = traced
        progress("capturing backward")
        with eager_kernels() as casts, leaves_told(module, examples, casts), suppress(_Traced):
            try:
                aot_autograd(fw_compiler=_as_it_stands, partition_fn=partition)(module, examples)
            except UnknownValue as error:  # torch.fx has added the model's lines to its message
                if not (place := place_in(str(error), packages=True)):
                    raise
                raise UnknownValue(place, error.lines) from error
    if not found:
        model = getattr(step, "model", step)
        raise OverspillError(
            f"{type(model).__name__} gave no graph that could be planned; does its loss need gradients?"
        )
    return JointOfStep(found[0], examples, inputs)


def captures(
    joint: JointGraph,
    inputs: list[InputInfo],
    around: Surroundings,
    divided: Callable[[JointGraph], JointGraph | None] | None = in_pieces,
) -> Iterator[Captured]:
    """Yield the captured Graph of `joint`, then the same `divided` in pieces of rows, if its chains are worth it."""
    yield capture(joint, inputs, around)
    if divided is not None and (other := divided(joint)) is not None:
        yield capture(other, inputs, around)


@contextmanager
def leaves_told(module: fx.GraphModule, examples: Sequence[Any], casts: Casts) -> Iterator[None]:
    """Pass traced parameters to `casts` whenever `module` is traced, inside the block."""
    placeholders = module.graph.find_nodes(op="placeholder")
    leaves = [
        node
        for node, example in zip(placeholders, examples, strict=True)
        if isinstance(example, Tensor) and example.requires_grad and example.is_leaf and not is_view(example)
    ]
    with module.graph.inserting_after(placeholders[-1] if placeholders else None):
        told = module.graph.call_function(casts.begin, (leaves,))
    module.recompile()
    try:
        yield
    finally:
        module.graph.erase_node(told)
        module.recompile()


def describe_inputs(module: fx.GraphModule, examples: Sequence[Any]) -> list[InputInfo]:
    """Return kind and readable name of each input of Dynamo's graph, in order."""
    described = []
    for node, example in zip(module.graph.find_nodes(op="placeholder"), examples, strict=True):
        grapharg = node.meta.get("grapharg")
        source = str(grapharg.source.name) if grapharg is not None and not callable(grapharg.source.name) else node.name
        if isinstance(example, nn.Parameter) or "._parameters[" in source:  # or a tensor that one has
            kind = TensorKind.PARAMETER
        else:
            kind = TensorKind.BUFFER if "._buffers[" in source else TensorKind.INPUT
        described.append(InputInfo(kind, readable_path(source)))
    return described


def _as_it_stands(module: fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
    return module.forward
