"""Find the layer and layer type of an FX node from Dynamo's metadata."""

from __future__ import annotations

import re
from typing import Any

from torch import fx

from overspill.core import LayerType

# First match wins: by the name of the aten op, then by the class of the module that called it.
_OP_TYPES: tuple[tuple[str, LayerType], ...] = (
    (r"conv", LayerType.CONV),
    (r"attention", LayerType.ATTENTION),
    (r"embedding", LayerType.EMBEDDING),
    (r"norm", LayerType.NORM),
    (r"pool", LayerType.POOL),
    (r"dropout|bernoulli", LayerType.DROPOUT),
    (r"nll_loss|cross_entropy|mse_loss|_loss", LayerType.LOSS),
    (r"softmax", LayerType.SOFTMAX),
    (r"relu|gelu|silu|tanh|sigmoid|threshold|hardtanh|elu|mish|softplus", LayerType.ACTIVATION),
    (r"^(mm|addmm|bmm|baddbmm|linear|matmul)$", LayerType.LINEAR),
    (r"^(add|cat|stack|concat)", LayerType.JOIN),
)
_MODULE_TYPES: tuple[tuple[str, LayerType], ...] = (
    (r"Conv", LayerType.CONV),
    (r"MultiheadAttention", LayerType.ATTENTION),
    (r"Linear", LayerType.LINEAR),
    (r"Norm", LayerType.NORM),
    (r"Pool", LayerType.POOL),
    (r"Dropout", LayerType.DROPOUT),
    (r"Embedding", LayerType.EMBEDDING),
    (r"Loss", LayerType.LOSS),
    (r"Softmax", LayerType.SOFTMAX),
    (r"ReLU|GELU|SiLU|Tanh|Sigmoid|ELU|Mish|Softplus", LayerType.ACTIVATION),
)


class LayerNames:
    """Names the layer of each node by its module's path.

    Outside of leaf modules the op's name is added. Backward nodes get the layer of the forward node with the same
    autograd sequence number.
    """

    def __init__(self) -> None:
        self._by_sequence: dict[int, tuple[str, LayerType]] = {}

    def forward(self, node: fx.Node) -> tuple[str, LayerType]:
        """Return layer name and type of a forward node."""
        path, leaf = _module_of(node)
        kind = _match(_MODULE_TYPES, leaf) if leaf else None
        kind = kind or _match(_OP_TYPES, op_name(node)) or LayerType.OTHER
        # A model that is one of torch's layers itself has no path.
        found = (path if leaf and path else f"{path}.{node.name}".lstrip("."), kind)
        sequence = node.meta.get("seq_nr")
        # An op that saves nothing repeats the number of the one before it; the first one owns it.
        if sequence is not None:
            self._by_sequence.setdefault(sequence, found)
        return found

    def backward(self, node: fx.Node) -> tuple[str, LayerType]:
        """Return layer name and type of a backward node."""
        found = self._by_sequence.get(node.meta.get("seq_nr", -1))
        if found is not None:
            return found
        path, _ = _module_of(node)
        return path or node.name, _match(_OP_TYPES, op_name(node)) or LayerType.OTHER


def op_name(node: fx.Node) -> str:
    """Return the name of a node's op without namespace and overload: `convolution`."""
    target = node.target
    packet = getattr(target, "overloadpacket", None)
    return str(packet).rsplit(".", 1)[-1] if packet is not None else getattr(target, "__name__", str(target))


def readable_path(source: str) -> str:
    """Turn Dynamo's source into a readable path: `L['self']._modules['a']._parameters['w']` → `a.w`."""
    path = re.sub(r"^L\['\w+'\](\.__self__)?", "", source)  # the latter where a bound method is compiled
    path = re.sub(r"\._(?:modules|parameters|buffers)\['([^']*)'\]", r".\1", path)
    path = re.sub(r"\[['\"]?([^\]'\"]*)['\"]?\]", r".\1", path)
    # A loss that is a module (models/user.py) is the layer `loss`.
    path = path.replace(".__self__._criterion", "")
    return path.lstrip(".") or re.sub(r"^L\['(\w+)'\]$", r"\1", source)


def _module_of(node: fx.Node) -> tuple[str, str]:
    """Return the path of the innermost module around `node`, and its class if it is torch's leaf."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    if not stack:
        return "", ""
    path, cls = list(stack.values())[-1]
    module, name = (cls.__module__, cls.__name__) if isinstance(cls, type) else str(cls).rsplit(".", 1)
    leaf = name if module.startswith("torch.nn.modules") and name not in {"Sequential", "ModuleList", "Module"} else ""
    path = readable_path(path)
    return ("" if path == "self" else path), leaf


def layer_type_of(op: str) -> LayerType:
    """Return the layer type that an aten op's name suggests; OTHER if none."""
    return _match(_OP_TYPES, op) or LayerType.OTHER


def _match(table: tuple[tuple[str, LayerType], ...], text: str) -> LayerType | None:
    return next((kind for pattern, kind in table if re.search(pattern, text)), None)
