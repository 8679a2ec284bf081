"""Trace a user's step with the installed TensorFlow, from a Keras model or a function to a StepGraph.

Nothing is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from overspill.core.errors import OverspillError, RequestError, UnsupportedError

from .graph import GraphOp, Made, Output, StepGraph

_KEPT_ATTRS = ("strides", "padding", "data_format")
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_LIKE_ITS_INPUT = frozenset({"ZerosLike", "OnesLike", "Identity"})
_UNROLLED = frozenset({"While", "StatelessWhile", "If", "StatelessIf", "Case"})
OPTIMIZERS = {
    "sgd": ("SGD", {}), "momentum": ("SGD", {"momentum": 0.9}), "adam": ("Adam", {}), "adamw": ("AdamW", {}),
    "adagrad": ("Adagrad", {}), "rmsprop": ("RMSprop", {}), "adafactor": ("Adafactor", {}),
}  # fmt: skip
_HELP = (
    "return a Keras model, or a pair of a function that makes a step (as tf.function takes it) and the tf.TensorSpecs "
    "of its arguments"
)


def trace(target: str, batch: int, optimizer: str | None) -> StepGraph:
    """Return the graph of the step that `package.module:callable` describes, at a batch size.

    The callable gets the batch size if it takes one. It returns a Keras model, or a function and the `tf.TensorSpec`s
    of its arguments. A compiled model has its own loss and optimizer. Any other minimises the mean of its outputs with
    the named `optimizer` (None: only the forward pass). Raises RequestError for any other result and for errors of the
    user's code, UnsupportedError for a graph with a loop or a branch.
    """
    tensorflow = installed()
    try:
        step, specs = _step(tensorflow, _called(_found(target), batch), target, batch, optimizer)
        function = step if hasattr(step, "get_concrete_function") else tensorflow.function(step, jit_compile=False)
        return graph_of(function.get_concrete_function(*specs))
    except OverspillError:
        raise
    except Exception as error:  # whatever the user's code raises is theirs to read in one line
        raise RequestError(f"{target}: {type(error).__name__}: {' '.join(str(error).split())[:400]}") from error


def installed() -> Any:
    """Return the module `tensorflow`. Raises RequestError if it is not installed."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # it traces; a GPU would be filled
    try:
        return importlib.import_module("tensorflow")
    except ImportError as error:
        raise RequestError("--tensorflow needs the tensorflow package: pip install overspill[tensorflow]") from error


def graph_of(concrete: Any) -> StepGraph:
    """Return the graph of a concrete function, with the functions that it calls inlined."""
    flat = _Flat()
    graph = concrete.graph
    variables = {id(variable.handle): variable for variable in graph.variables}
    captured = {
        placeholder.name: variables.get(id(outer)) for outer, placeholder in graph.captures
    }  # fmt: skip
    outputs = flat.add(graph, {}, captured)
    fetches = [*(output.op for output in outputs), *flat.with_effects]
    return StepGraph(tuple(flat.ops), tuple(dict.fromkeys(fetches)), frozenset(flat.trained), frozenset(flat.states))


class _Flat:
    """The ops of a graph with its function calls inlined."""

    def __init__(self) -> None:
        self.ops: list[GraphOp] = []
        self.trained: list[int] = []
        self.states: list[int] = []
        self.with_effects: list[int] = []

    def add(self, graph: Any, given: Mapping[str, Output], captured: Mapping[str, Any]) -> list[Output]:
        """Add the ops of `graph`, and return its outputs. Arguments are `given` by name or `captured` variables."""
        place: dict[str, Output] = dict(given)
        ends: dict[str, list[int]] = {}
        for op in graph.get_operations():
            if op.type in _UNROLLED:
                raise UnsupportedError(
                    f"{op.name} is a {op.type}, whose number of turns a graph does not say; unroll it (for Keras' "
                    "recurrent layers: unroll=True)"
                )
            # Arguments are there already; calls are inlined.
            if op.outputs and op.outputs[0].name in place:
                continue
            inputs = [place[tensor.name] for tensor in op.inputs if tensor.name in place]
            controls = [end for before in op.control_inputs for end in ends.get(before.name, [])]
            if op.type in _CALLS:
                ends[op.name] = self._call(graph, op, inputs, place)
                continue
            # Append the op, and note where its outputs are.
            variable = captured.get(op.outputs[0].name) if op.outputs else None
            position = self._append(op, inputs, controls, variable)
            ends[op.name] = [position]
            for index, tensor in enumerate(op.outputs):
                place[tensor.name] = Output(position, index)
        return [place[tensor.name] for tensor in getattr(graph, "outputs", ()) if tensor.name in place]

    def _append(self, op: Any, inputs: Sequence[Output], controls: Sequence[int], variable: Any) -> int:
        if variable is not None:
            made: tuple[Made, ...] = (_made(variable.dtype, variable.shape, op),)
            self.ops.append(GraphOp("VarHandleOp", variable.name, (), (), made))
            (self.trained if variable.trainable else self.states).append(len(self.ops) - 1)
            return len(self.ops) - 1
        # Attributes that decide about memory, and the outputs' shapes.
        attrs = {
            name: _plain(op.get_attr(name)) for name in _KEPT_ATTRS
                if op.type.startswith("Conv2D") and name in op.node_def.attr
        }  # fmt: skip
        if op.type in _LIKE_ITS_INPUT and op.outputs[0].shape.rank is None and inputs:
            made = (self.ops[inputs[0].op].makes[inputs[0].number],)
        else:
            made = tuple(_made(tensor.dtype, tensor.shape, op) for tensor in op.outputs)
        self.ops.append(GraphOp(op.type, op.name, tuple(inputs), tuple(controls), made, attrs))
        if op.type.startswith("Assign") or "Apply" in op.type:
            self.with_effects.append(len(self.ops) - 1)
        return len(self.ops) - 1

    def _call(self, graph: Any, op: Any, inputs: Sequence[Output], place: dict[str, Output]) -> list[int]:
        """Add the function that `op` calls, and return the ops at its ends."""
        function = graph._get_function(op.get_attr("f").name)
        body = getattr(function, "graph", None)
        if body is None:
            raise UnsupportedError(f"{op.name} calls a function that was not traced here")
        arguments = {tensor.name: source for tensor, source in zip(body.inputs, inputs, strict=True)}
        outputs = self.add(body, arguments, {})
        for tensor, output in zip(op.outputs, outputs, strict=True):
            place[tensor.name] = output
        return [output.op for output in outputs]


def _made(dtype: Any, shape: Any, op: Any) -> Made:
    """Return the dtype and shape of an output of `op`.

    An output without a known shape must be on the host, where it has no bytes here.
    """
    dtype = dtype.base_dtype if hasattr(dtype, "base_dtype") else dtype
    label = getattr(dtype, "name", str(dtype))
    if shape.rank is None or None in shape.as_list():
        if label in {"resource", "variant", "string"} or label.startswith(("int", "uint")):
            return Made(label, ())
        if op.type.startswith("FusedBatchNorm"):  # cuDNN's reserved space, which is of float16
            return Made(label, (0,))
        raise UnsupportedError(
            f"TensorFlow does not know the shape of {op.name} ({shape}); fix the batch in its inputs"
        )
    return Made(label, tuple(shape.as_list()))


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else [*value] if isinstance(value, (list, tuple)) else value


def _found(target: str) -> Callable[..., Any]:
    module_name, colon, name = target.partition(":")
    if not colon or not name:
        raise RequestError(f"--tensorflow {target} names no function; write package.module:callable")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), name, None)
    except ImportError as error:
        raise RequestError(f"cannot import {module_name}: {error}") from error
    if not callable(found):
        raise RequestError(f"{module_name} has no function {name}; name one that it has")
    return found


def _called(function: Callable[..., Any], batch: int) -> Any:
    import inspect  # noqa: PLC0415  # one call

    takes_batch = bool(inspect.signature(function).parameters)
    return function(batch) if takes_batch else function()


def _step(tensorflow: Any, made: Any, target: str, batch: int, optimizer: str | None) -> tuple[Any, Any]:
    """Return the function of a step, and the specs of its arguments, for the result of the user's callable."""
    if isinstance(made, tensorflow.keras.Model):
        return _step_of_model(tensorflow, made, batch, optimizer)
    if isinstance(made, tuple) and len(made) == 2 and callable(made[0]):
        return made
    raise RequestError(f"{target} returned a {type(made).__name__}; {_HELP}")


def _step_of_model(tensorflow: Any, model: Any, batch: int, optimizer: str | None) -> tuple[Any, list[Any]]:
    """Return the training step of a Keras model, with its arguments' specs.

    Without an optimizer it is the forward pass.
    """
    specs = [
        tensorflow.TensorSpec([batch, *tensor.shape[1:]], tensor.dtype) for tensor in model.inputs
    ]  # fmt: skip

    def forward(*arguments: Any) -> Any:
        return model(arguments[0] if len(arguments) == 1 else list(arguments), training=optimizer is not None)

    # Inference needs no optimizer.
    if optimizer is None:
        return forward, specs
    compiled = getattr(model, "optimizer", None) is not None and getattr(model, "loss", None) is not None
    if compiled:
        chosen = model.optimizer
    else:
        name, options = OPTIMIZERS[optimizer]
        chosen = getattr(tensorflow.keras.optimizers, name)(**options)
    # States exist before the step; labels come with a compiled model.
    chosen.build(model.trainable_variables)
    outputs = len(model.outputs)
    labels = [_label(tensorflow, tensor, model.loss, batch) for tensor in model.outputs] if compiled else []

    def step(*arguments: Any) -> Any:
        inputs, targets = arguments[: len(specs)], arguments[len(specs) :]
        with tensorflow.GradientTape() as tape:
            answers = forward(*inputs)
            if compiled:
                value = model.compute_loss(
                    x=inputs[0], y=targets[0] if outputs == 1 else list(targets), y_pred=answers, training=True
                )
            else:
                value = sum(tensorflow.reduce_mean(part) for part in tensorflow.nest.flatten(answers))
        gradients = tape.gradient(value, model.trainable_variables)
        chosen.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    return step, [*specs, *labels]


def _label(tensorflow: Any, output: Any, loss: Any, batch: int) -> Any:
    """Return the spec of the labels with which the loss compares an output."""
    name = str(loss if isinstance(loss, str) else getattr(loss, "name", type(loss).__name__))
    if name.lower().replace("_", "").startswith("sparse"):
        return tensorflow.TensorSpec([batch, *output.shape[1:-1]], tensorflow.int32)
    return tensorflow.TensorSpec([batch, *output.shape[1:]], output.dtype)
