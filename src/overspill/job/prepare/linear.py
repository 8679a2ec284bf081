"""Find and replace a model's linear layers, for adapters and quantisation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of all linear layers.

    The `Conv1D` of transformers is one too: a linear layer with its weight transposed.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            yield name, module


def width_of(layer: nn.Module) -> tuple[int, int]:
    """Return the number of input and of output features of `layer`."""
    weight: Any = layer.weight
    made, read = weight.shape if isinstance(layer, nn.Linear) else weight.shape[::-1]
    return read, made


def heads(model: nn.Module) -> set[nn.Module]:
    """Return the output layers, and those that share an embedding's weight.

    transformers (integrations/bitsandbytes.py, `get_keys_to_not_convert`) and peft's "all-linear" (peft/utils/other.py)
    leave them unchanged.
    """
    get: Callable[[], Any] | None = getattr(model, "get_output_embeddings", None)
    layers = [layer for _, layer in linear_layers(model)]
    head = get() if get is not None else None
    found = {layers[-1] if head is None else head} if layers else set[nn.Module]()
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return found | {layer for layer in layers if id(layer.weight) in shared}


def replace_layer(model: nn.Module, name: str, new: nn.Module) -> None:
    """Replace the layer called `name` by `new`."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, new)


def bias_of(layer: nn.Module) -> Tensor | None:
    """Return the layer's bias, or None."""
    found: Any = layer.bias
    return found
