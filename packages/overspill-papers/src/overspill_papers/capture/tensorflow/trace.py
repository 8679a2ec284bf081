"""Trace a user's step with the installed TensorFlow, from a Keras model or a function to a StepGraph.

Nothing is run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.core.text import pip_install

from .graph import SHAPES, GraphOp, Made, Output, StepGraph
from .lists import MAKES_LISTS, ListOps, TensorList, evaluated

_KEPT_ATTRS = ("strides", "padding", "data_format")
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
_LIKE_ITS_INPUT = frozenset({"ZerosLike", "OnesLike", "Identity"})
_LOOPS = frozenset({"While", "StatelessWhile"})
_BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
MOST_TURNS = 100_000
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
    user's code, UnsupportedError for a loop or a branch whose
    condition depends on data.
    """
    tensorflow = installed()
    try:
        step, specs = _step(tensorflow, _called(_found(target), batch), target, batch, optimizer)
        specs = tensorflow.nest.map_structure(lambda spec: _with_batch(tensorflow, spec, batch), list(specs))
        # A signature of the function's own would have its sizes unknown.
        step = getattr(step, "python_function", step)
        return graph_of(tensorflow.function(step, jit_compile=False).get_concrete_function(*specs))
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
        raise RequestError(f"--tensorflow needs the tensorflow package: {pip_install('tensorflow')}") from error


def graph_of(concrete: Any) -> StepGraph:
    """Return the graph of a concrete function, with the functions that it calls inlined."""
    flat = _Flat(installed())
    graph = concrete.graph
    variables = {id(variable.handle): variable for variable in graph.variables}
    captured = {
        placeholder.name: variables.get(id(outer)) for outer, placeholder in graph.captures
    }  # fmt: skip
    outputs = flat.add(graph, {}, captured)
    fetches = [*(output.op for output in outputs if isinstance(output, Output)), *flat.with_effects]
    return StepGraph(tuple(flat.ops), tuple(dict.fromkeys(fetches)), frozenset(flat.trained), frozenset(flat.states))


class _Flat:
    """The ops of a graph with its function calls inlined, its loops unrolled, and the taken branches alone."""

    def __init__(self, tensorflow: Any) -> None:
        self.ops: list[GraphOp] = []
        self.trained: list[int] = []
        self.states: list[int] = []
        self.with_effects: list[int] = []
        self._tensorflow = tensorflow
        self._values: dict[Output, Any] = {}
        self._name = ""
        self._lists = ListOps(self._append_made, self._made_by, self._values)

    def add(
        self, graph: Any, given: Mapping[str, Output | TensorList], captured: Mapping[str, Any]
    ) -> list[Output | TensorList]:
        """Add the ops of `graph`, and return its outputs. Arguments are `given` by name or `captured` variables."""
        place: dict[str, Output | TensorList] = dict(given)
        ends: dict[str, list[int]] = {}
        for op in _in_order(graph):
            # Arguments are there already; calls are inlined.
            if op.outputs and op.outputs[0].name in place:
                continue
            inputs = [place[tensor.name] for tensor in op.inputs if tensor.name in place]
            controls = [end for before in op.control_inputs for end in ends.get(before.name, [])]
            inner = self._inner(graph, op, inputs)
            if inner is None and (op.type in MAKES_LISTS or any(isinstance(each, TensorList) for each in inputs)):
                self._name = op.name
                inner = self._lists.run(op, inputs)
            if inner is not None:
                place |= zip((tensor.name for tensor in op.outputs), inner, strict=False)
                ends[op.name] = [output.op for output in inner if isinstance(output, Output)]
                continue
            # Append the op, and note where its outputs are.
            variable = captured.get(op.outputs[0].name) if op.outputs else None
            outputs = [each for each in inputs if isinstance(each, Output)]
            position = self._append(op, outputs, controls, variable)
            ends[op.name] = [position]
            for index, tensor in enumerate(op.outputs):
                place[tensor.name] = Output(position, index)
            self._follow(op, position, outputs)
        return [place[tensor.name] for tensor in getattr(graph, "outputs", ()) if tensor.name in place]

    def _follow(self, op: Any, position: int, inputs: Sequence[Output]) -> None:
        """Note the values of what `op` makes if they are known before it runs."""
        read = [self._values.get(each) for each in inputs]
        made = None
        if op.type in SHAPES and op.type != "ShapeN" and inputs:
            shape = self.ops[inputs[0].op].makes[inputs[0].number].shape
            made = [self._tensorflow.constant({"Shape": shape, "Rank": len(shape)}.get(op.type, prod(shape))).numpy()]
        elif len(read) == len(op.inputs) and all(value is not None for value in read):
            made = evaluated(self._tensorflow, op, read)
        for index, value in enumerate(made or ()):
            self._values[Output(position, index)] = value

    def _inner(self, graph: Any, op: Any, inputs: Sequence[Output | TensorList]) -> list[Output | TensorList] | None:
        """Add the functions that `op` calls, runs again and again or chooses from; None for any other op."""
        if op.type in _CALLS:
            return self._call(_body(graph, op, "f"), op, inputs)
        if op.type in _LOOPS:
            return self._loop(graph, op, inputs)
        if op.type in _BRANCHES:
            value = self._values.get(inputs[0]) if isinstance(inputs[0], Output) else None
            if value is None:
                raise UnsupportedError(f"{op.name} is a {op.type}, whose condition the graph does not say")
            if op.type.endswith("Case"):
                functions = [function.name for function in op.get_attr("branches")]
                chosen = int(value) if 0 <= int(value) < len(functions) else -1
                return self._call(graph._get_function(functions[chosen]).graph, op, inputs[1:])
            return self._call(_body(graph, op, "then_branch" if bool(value) else "else_branch"), op, inputs[1:])
        return None

    def _call(self, body: Any, op: Any, inputs: Sequence[Output | TensorList]) -> list[Output | TensorList]:
        if body is None:
            raise UnsupportedError(f"{op.name} calls a function that was not traced here")
        arguments = {tensor.name: source for tensor, source in zip(body.inputs, inputs, strict=True)}
        return self.add(body, arguments, {})

    def _loop(self, graph: Any, op: Any, inputs: Sequence[Output | TensorList]) -> list[Output | TensorList]:
        """Unroll a loop whose turns follow from counters and shapes."""
        condition, body = _body(graph, op, "cond"), _body(graph, op, "body")
        state = list(inputs)
        for _ in range(MOST_TURNS):
            start = len(self.ops)
            (goes_on,) = self._call(condition, op, state)
            value = self._values.get(goes_on) if isinstance(goes_on, Output) else None
            # The condition is on the host, and holds nothing.
            del self.ops[start:]
            while self._values and next(reversed(self._values)).op >= start:
                self._values.popitem()
            if value is None:
                break
            if not value:
                return state
            state = self._call(body, op, state)
        raise UnsupportedError(f"{op.name} is a {op.type}, whose number of turns the graph does not say")

    def _made_by(self, output: Output) -> Made:
        return self.ops[output.op].makes[output.number]

    def _outputs(self, op: Any, inputs: Sequence[Output]) -> Any:
        """Return the outputs of `op`; where a loop left their shapes open, those of the op on what it really reads."""
        whole = all(tensor.shape.is_fully_defined() for tensor in op.outputs)
        if whole or not inputs or len(inputs) != len(op.inputs):
            return op.outputs
        tensorflow = self._tensorflow
        with tensorflow.Graph().as_default() as graph:
            read = [
                tensorflow.constant(self._values[each], tensor.dtype) if each in self._values
                else tensorflow.compat.v1.placeholder(tensor.dtype, self._made_by(each).shape)
                for each, tensor in zip(inputs, op.inputs, strict=True)
            ]  # fmt: skip
            attrs = dict(op.node_def.attr)
            return graph.create_op(op.type, read, [tensor.dtype for tensor in op.outputs], attrs=attrs).outputs

    def _append_made(self, kind: str, read: Sequence[Output], made: Sequence[Made]) -> list[Output]:
        self.ops.append(GraphOp(kind, self._name, tuple(read), (), tuple(made)))
        return [Output(len(self.ops) - 1, index) for index in range(len(made))]

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
            made = tuple(_made(tensor.dtype, tensor.shape, op) for tensor in self._outputs(op, inputs))
        self.ops.append(GraphOp(op.type, op.name, tuple(inputs), tuple(controls), made, attrs))
        if op.type.startswith("Assign") or "Apply" in op.type:
            self.with_effects.append(len(self.ops) - 1)
        return len(self.ops) - 1


def _in_order(graph: Any) -> Iterator[Any]:
    """Yield the ops of `graph`, each after those that it needs.

    The order is that of their definition, where a loop may read lists that its gradient has added later.
    """
    seen: set[str] = set()
    left = list(reversed(graph.get_operations()))
    while left:
        op = left[-1]
        before = [each for each in (*(tensor.op for tensor in op.inputs), *op.control_inputs) if each.name not in seen]
        if op.name in seen or not before:
            left.pop()
            if op.name not in seen:
                seen.add(op.name)
                yield op
        else:
            left += reversed(before)


def _body(graph: Any, op: Any, attribute: str) -> Any:
    """Return the graph of the function in an attribute of `op`, or None if it was not traced here."""
    return getattr(graph._get_function(op.get_attr(attribute).name), "graph", None)


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


def _with_batch(tensorflow: Any, spec: Any, batch: int) -> Any:
    """Return a spec whose first size is the batch if it is open. Raises RequestError for another open size."""
    if not isinstance(spec, tensorflow.TensorSpec):
        return spec
    if spec.shape.rank is None or None in spec.shape.as_list()[1:]:
        raise RequestError(f"{spec} leaves more than its batch open; give its other sizes")
    return tensorflow.TensorSpec([batch if size is None else size for size in spec.shape], spec.dtype, spec.name)


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
