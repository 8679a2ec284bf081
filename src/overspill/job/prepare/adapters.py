"""LoRA adapters (Hu et al., 2021), which peft adds itself.

Quantised weights are the exception, because bitsandbytes has not made them here. Next to them is a layer of Overspill,
with the forward of peft/tuners/lora/bnb.py, 0.21.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.core.text import pip_install

from .linear import heads, linear_layers
from .quantized import Linear4bit, Quantized

ALL_LINEAR = "all-linear"


def add_adapters(model: nn.Module, rank: int, targets: str | None, dropout: float) -> None:
    """Freeze `model` and add adapters to layers of it, with peft.

    `targets` are names of layers, separated by commas, or `all-linear`. None: those that peft chooses for the kind of
    model; if it knows none, all linear ones but the output's. Raises RequestError if no layer matches.
    """
    try:
        import peft  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise RequestError(f"lora= runs peft, which is not here: {pip_install('bert')}", fields=["lora"]) from error
    # A layer is meant by its whole name, or by the last parts of it.
    names = _all_linear(model) if targets == ALL_LINEAR else None if targets is None else targets.split(",")
    if targets is None:
        kind = getattr(getattr(model, "config", None), "model_type", None)
        if kind not in peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
            names = _all_linear(model)
    config = peft.LoraConfig(r=rank, target_modules=names, lora_dropout=dropout)
    config._register_custom_module({Quantized: _beside_few_bits()})
    # peft moves adapters to the layer's device and dtype, and then casts all to float32. They are made so, and torch
    # cannot
    # move fake ones.
    try:
        with warnings.catch_warnings(), patch.object(nn.Module, "to", _stay):
            warnings.simplefilter("ignore")  # of layers whose weight is transposed, which it handles
            peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise _no_targets(model, targets) from error


def _stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
    return module


def _all_linear(model: nn.Module) -> list[str]:
    """Return the names of all linear layers but the output's."""
    kept = heads(model)
    found = {name: layer for name, layer in linear_layers(model) if layer not in kept}
    found |= {name: layer for name, layer in model.named_modules() if isinstance(layer, Quantized)}
    if not found:
        raise _no_targets(model, None)
    return list(found)


def _no_targets(model: nn.Module, targets: str | None) -> RequestError:
    kind = type(model).__name__
    if targets is None:
        return RequestError(f"{kind} has no linear layers that LoRA could adapt; leave lora= out", fields=["lora"])
    last = {name.rpartition(".")[2] for name in _all_linear(model)}
    return RequestError(
        f"lora_targets={targets}: peft finds no such layers in {kind}; it has {', '.join(sorted(last))}, or take "
        "all-linear",
        fields=["lora_targets"],
    )


@cache
def _beside_few_bits() -> type[nn.Module]:
    """Return peft's layer for an adapter of a quantised layer."""
    from peft.tuners.lora.layer import Linear  # noqa: PLC0415

    class Adapted(Linear):
        def forward(self, x: Tensor) -> Tensor:
            """Return the sum of the layer's and the adapter's outputs."""
            result: Tensor = self.base_layer(x)
            if self.disable_adapters:
                return result
            if isinstance(self.base_layer, Linear4bit):
                result = result.clone()
            dtype = result.dtype
            (name,) = self.active_adapters
            first, second, dropout = self.lora_A[name], self.lora_B[name], self.lora_dropout[name]
            converts = not torch.is_autocast_enabled()
            added = second(first(dropout(x.to(first.weight.dtype) if converts else x))) * self.scaling[name]
            return result + (added.to(dtype) if converts else added)

    return Adapted


def upcast(model: nn.Module) -> None:
    """Make all that is not quantised float32, by peft's `prepare_model_for_kbit_training`."""
    import peft  # noqa: PLC0415

    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
