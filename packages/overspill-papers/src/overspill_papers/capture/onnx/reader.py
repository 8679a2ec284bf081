"""Read an ONNX model as the symbol that MXNet's own importer makes of it.

An ONNX file describes how to run a network, not how to train it. Here it is trained as MXNet trains the symbol. Weights
are the initializers of floating point; other constants that ops read are not trained. The loss is a softmax's cross
entropy on an output of two dimensions, and the mean of any other. All is float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from overspill.core.errors import RequestError, UnsupportedError
from overspill.core.text import pip_install
from overspill_papers.capture.mxnet.shapes import Shape
from overspill_papers.capture.mxnet.symbol import Node, Symbol

from .known import KnownValues
from .nodes import SymbolNodes

LABEL = "softmax_label"


def read(path: Path, batch: int, shapes: Mapping[str, Shape], *, trains: bool) -> tuple[Symbol, dict[str, Shape]]:
    """Return the symbol of the ONNX model at `path`, with input shapes.

    They are the given ones, otherwise those of the file. A size without a number in the file is the batch. Raises
    RequestError for an invalid model, and for inputs that do not exist; UnsupportedError for unknown operators.
    """
    try:
        onnx: Any = importlib.import_module("onnx")
        for part in ("inliner", "reference"):
            importlib.import_module(f"onnx.{part}")
    except ImportError as error:
        raise RequestError(f"--onnx needs the onnx package: {pip_install('onnx')}") from error
    if not path.is_file():
        raise RequestError(f"cannot read {path}: there is no such file; name one that is there")
    try:
        model = onnx.load(str(path), load_external_data=False)
        inputs = _fix_inputs(model.graph, batch, shapes)
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
    except RequestError:
        raise
    except Exception as error:  # protobuf's errors and onnx's have no base of their own
        raise RequestError(f"{path} is not a model of ONNX: {' '.join(str(error).split())[:300]}") from error
    return _symbol(onnx, model, trains=trains), inputs


def _fix_inputs(graph: Any, batch: int, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Write the shapes of all inputs into `graph`, and return them."""
    weights = {initializer.name for initializer in graph.initializer}
    found: dict[str, Shape] = {}
    for value in graph.input:
        if value.name in weights:
            continue
        # A given shape, or the file's with the batch for its one unknown size.
        dims = value.type.tensor_type.shape.dim
        names = {dim.dim_param for dim in dims if not dim.HasField("dim_value")}
        if value.name in shapes:
            found[value.name] = shapes[value.name]
        elif len(names) > 1 or not value.type.tensor_type.HasField("shape"):
            raise RequestError(
                f"the file does not say the shape of {value.name}; give it with --input {value.name}=N,…"
            )
        else:
            found[value.name] = tuple(dim.dim_value if dim.HasField("dim_value") else batch for dim in dims)
        # Write the shape into the graph. MXNet has no arrays without a dimension.
        value.type.tensor_type.shape.ClearField("dim")
        for size in found[value.name]:
            value.type.tensor_type.shape.dim.add().dim_value = size
    for name in shapes:
        if name not in found:
            raise RequestError(f"the model has no input {name!r}; its inputs: {', '.join(found)}")
    return found


def _symbol(onnx: Any, model: Any, *, trains: bool) -> Symbol:
    """Return the network, with a loss at its end if it is trained. Nodes are in the file's order."""
    graph, known = model.graph, KnownValues(onnx, model)
    made = SymbolNodes(onnx, known)
    for value in graph.input:
        if value.name not in known.weights and not known.is_constant(value.name):
            made.place[value.name] = made.variable(value.name)
    _read_nodes(graph, known, made)
    # The outputs, then a loss on the first.
    heads = tuple(made.place[value.name] for value in graph.output if value.name in made.place)
    if not heads:
        raise UnsupportedError("the model has no output that is computed")
    if not trains:
        return Symbol(tuple(made.nodes), heads)
    if len(known.shape(graph.output[0].name)) == 2:
        loss = made.add(Node("SoftmaxOutput", "softmax", (heads[0], made.variable(LABEL))))
    else:
        loss = made.add(Node("MakeLoss", "loss", (made.add(Node("mean", "mean", (heads[0],))),)))
    return Symbol(tuple(made.nodes), (loss,))


def _read_nodes(graph: Any, known: KnownValues, made: SymbolNodes) -> None:
    for number, node in enumerate(graph.node):
        if known.folds(node):
            continue
        branch = known.branch(node)
        if branch is None:
            made.read(node, node.name or f"{node.op_type.lower()}{number}")
            continue
        # The condition is known: its branch is a part of the network.
        known.add_initializers(branch)
        _read_nodes(branch, known, made)
        for output, value in zip(node.output, branch.output, strict=True):
            made.alias(output, value.name)
