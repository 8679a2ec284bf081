"""What is known of an ONNX model before it runs: shapes, and values that follow from shapes and constants alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import numpy as np

from overspill.core.errors import UnsupportedError
from overspill_papers.capture.mxnet.shapes import Shape

LARGEST_VALUE = 1 << 18
"""Numbers in the largest array whose values are computed. Of a larger one, a mask for example, the shape is enough."""
_SETTING = 16
"""Numbers in the largest array of weights that may be a setting of an op: the scales of Resize, for example.

A larger node Constant is a weight, as in files that have no initializers.
"""


class KnownValues:
    """The shapes of all values so far, and those of constants.

    Floating-point initializers with a dimension are weights. A shape with one value (ConstantOfShape) stands for a
    weight that was left out of the file.
    """

    def __init__(self, onnx: Any, model: Any) -> None:
        self._onnx, self._opsets = onnx, {entry.domain: entry.version for entry in model.opset_import}
        self._version = model.ir_version
        self._types: dict[str, Any] = {value.name: value.type for value in model.graph.input}
        self._values: dict[str, Any] = {}
        self._settings: dict[str, Any] = {}
        self.weights: set[str] = set()
        self._of_file: set[str] = set()
        self.add_initializers(model.graph)

    def is_constant(self, name: str) -> bool:
        """Return whether the value is known before the network runs, and is no weight."""
        return name in self._values

    def folds(self, node: Any) -> bool:
        """Infer the shapes of the node's outputs, and return whether they are constants, which need no op."""
        read = [name for name in node.input if name]
        if any(attribute.HasField("g") for attribute in node.attribute):
            return False  # a branch or a loop
        self._infer(node, read)
        if node.op_type == "ConstantOfShape" and self._of_file.issuperset(read) and self._is_float(node.output[0]):
            self.weights.update(node.output)
            return True
        if (
            node.op_type == "Constant"
            and self._is_float(node.output[0])
            and prod(self.shape(node.output[0])) > _SETTING
        ):
            self.weights.update(node.output)
            return True
        if node.op_type in {"Shape", "Size"} and self._is_known(read[0]):
            self._values[node.output[0]] = self._measured(node, read[0])
            return True
        if node.op_type != "Constant" and not (read and all(map(self.is_constant, read))):
            return False
        made = [name for name in node.output if name]
        self._values |= dict.fromkeys(made)
        small = all(not self._is_known(name) or prod(self.shape(name)) <= LARGEST_VALUE for name in made)
        if small and all(self._values.get(name) is not None for name in read):
            self._values |= zip(made, self._computed(node, read), strict=False)
        for name in made:
            if self._values[name] is not None:
                dtype = self._onnx.helper.np_dtype_to_tensor_dtype(self._values[name].dtype)
                self._types[name] = self._onnx.helper.make_tensor_type_proto(dtype, self._values[name].shape)
        return True

    def _computed(self, node: Any, read: Iterable[str]) -> list[Any]:
        """Return the values of the node's outputs, or nothing where the package's reference cannot compute them."""
        try:
            with np.errstate(all="ignore"):
                run = self._onnx.reference.ReferenceEvaluator(self._model_of(node, read))
                made: list[Any] = run.run(None, {name: self._values[name] for name in read})
        except Exception:  # noqa: BLE001 - numpy's errors, for ops that the reference has wrong; the shape stays known
            return []
        return made

    def branch(self, node: Any) -> Any | None:
        """Return the graph that an If runs, or None for another node or a condition that the network computes."""
        if node.op_type != "If" or self._values.get(node.input[0]) is None:
            return None
        taken = "then_branch" if bool(self._values[node.input[0]].reshape(-1)[0]) else "else_branch"
        return next(attribute.g for attribute in node.attribute if attribute.name == taken)

    def add_initializers(self, graph: Any) -> None:
        """Add the initializers of a graph, weights and constants."""
        for initializer in graph.initializer:
            kind = self._onnx.helper.tensor_dtype_to_np_dtype(initializer.data_type).kind
            dims = tuple(initializer.dims)
            self._types[initializer.name] = self._onnx.helper.make_tensor_type_proto(initializer.data_type, dims)
            if dims and kind not in "iub":
                self.weights.add(initializer.name)
                if prod(dims) <= _SETTING:
                    self._settings[initializer.name] = initializer
            else:
                self._values[initializer.name] = self._onnx.numpy_helper.to_array(initializer)
            self._of_file.add(initializer.name)

    def alias(self, name: str, source: str) -> None:
        """Note that `name` is another name of `source`."""
        self._types[name] = self._types[source]
        if source in self.weights:
            self.weights.add(name)
        if source in self._values:
            self._values[name] = self._values[source]

    def shape(self, name: str) -> Shape:
        """Return the shape of a value. Raises UnsupportedError if it depends on what the network computes."""
        if not self._is_known(name):
            raise UnsupportedError(f"the shape of {name} cannot be told; simplify the model first")
        return tuple(dim.dim_value for dim in self._types[name].tensor_type.shape.dim)

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a constant. Raises UnsupportedError if the network computes it."""
        value = self._values.get(name)
        if value is None and name in self._settings:
            value = self._onnx.numpy_helper.to_array(self._settings[name])
        if value is None:
            raise UnsupportedError(f"{name} is a setting that the network computes; simplify the model first")
        found: list[float] = value.reshape(-1).tolist()
        return found

    def integers(self, name: str) -> list[int]:
        """Return the integers of a constant."""
        return [int(number) for number in self.numbers(name)]

    def _model_of(self, node: Any, read: Iterable[str]) -> Any:
        helper = self._onnx.helper
        values = [helper.make_value_info(name, self._types[name]) for name in dict.fromkeys(read)]
        made = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
        graph = helper.make_graph([node], "constant", values, made)
        return helper.make_model(graph, opset_imports=self._opset_ids(), ir_version=self._version)

    def _opset_ids(self) -> list[Any]:
        return [self._onnx.helper.make_opsetid(domain, version) for domain, version in self._opsets.items()]

    def _infer(self, node: Any, read: Iterable[str]) -> None:
        onnx = self._onnx
        try:
            schema = onnx.defs.get_schema(node.op_type, self._opsets.get(node.domain, 1), node.domain)
        except onnx.defs.SchemaError:
            return  # the reader says that it does not know the operator
        types = {name: self._types[name] for name in read if name in self._types}
        data = {name: onnx.numpy_helper.from_array(self._values[name], name) for name in types
                if self._values.get(name) is not None}  # fmt: skip
        data |= {name: self._settings[name] for name in types if name in self._settings}
        try:
            self._types |= onnx.shape_inference.infer_node_outputs(
                schema, node, types, data, opset_imports=self._opset_ids(), ir_version=self._version
            )
        except onnx.shape_inference.InferenceError as error:
            raise UnsupportedError(f"{node.name or node.op_type}: {' '.join(str(error).split())[:200]}") from None

    def _is_known(self, name: str) -> bool:
        kind = self._types.get(name)
        if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
            return False
        return all(dim.HasField("dim_value") for dim in kind.tensor_type.shape.dim)

    def _is_float(self, name: str) -> bool:
        kind = self._types.get(name)
        dtype = 1 if kind is None else kind.tensor_type.elem_type
        return self._onnx.helper.tensor_dtype_to_np_dtype(dtype).kind == "f"

    def _measured(self, node: Any, name: str) -> Any:
        shape = self.shape(name)
        if node.op_type == "Size":
            return np.array(prod(shape), np.int64)
        ends: Mapping[str, int] = {attribute.name: attribute.i for attribute in node.attribute}
        return np.array(shape[ends.get("start", 0) : ends.get("end", len(shape))], np.int64)
