"""LoRA adapters (Hu et al., 2021) as peft adds them.

An adapter is a product of two thin matrices, parallel to a frozen linear layer. peft/tuners/lora/layer.py and bnb.py,
0.18: adapters are float32 also where the model is in half precision, and what they read is cast to that unless autocast
does it and the layer is quantised; no dropout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError

from .linear import heads, linear_layers, replace_layer, width_of
from .quantized import Quantized

_ALPHA = 8
"""peft's default; sizes do not depend on it."""

# The last part of the names of layers that peft adapts by default, by the `model_type` of transformers
# (peft/utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING); the last is our own GPT-2, likewise.
_QUERY_VALUE = ("q_proj", "v_proj")
TARGETS = {
    "t5": ("q", "v"), "mt5": ("q", "v"), "bart": _QUERY_VALUE, "gpt2": ("c_attn",), "bloom": ("query_key_value",),
    "opt": _QUERY_VALUE, "gptj": _QUERY_VALUE, "gpt_neox": ("query_key_value",), "gpt_neo": _QUERY_VALUE,
    "bert": ("query", "value"), "roberta": ("query", "value"), "xlm-roberta": ("query", "value"),
    "electra": ("query", "value"), "llama": _QUERY_VALUE, "gpt_bigcode": ("c_attn",), "mpt": ("Wqkv",),
    "falcon": ("query_key_value",), "mistral": _QUERY_VALUE, "mixtral": _QUERY_VALUE, "stablelm": _QUERY_VALUE,
    "phi": (*_QUERY_VALUE, "fc1", "fc2"), "gemma": _QUERY_VALUE, "gemma2": _QUERY_VALUE, "gemma3_text": _QUERY_VALUE,
    "qwen2": _QUERY_VALUE, "qwen3": _QUERY_VALUE, "Gpt2": ("qkv",),
}  # fmt: skip


class Adapted(nn.Module):
    """A frozen linear layer `base` plus an adapter of rank `rank`."""

    def __init__(self, base: nn.Module, rank: int) -> None:
        super().__init__()
        read, made = width_of(base) if not isinstance(base, Quantized) else (base.read, base.made)
        self.base_layer = base
        self.lora_A = nn.Linear(read, rank, bias=False, dtype=torch.float32)
        self.lora_B = nn.Linear(rank, made, bias=False, dtype=torch.float32)
        self.scaling = _ALPHA / rank

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the layer's and the adapter's outputs, in the layer's dtype."""
        result: Tensor = self.base_layer(x)
        dtype = result.dtype
        if isinstance(self.base_layer, Quantized):
            if torch.is_autocast_enabled("cuda"):
                return result + self.lora_B(self.lora_A(x)) * self.scaling
            return result + (self.lora_B(self.lora_A(x.float())) * self.scaling).to(dtype)
        result = result + self.lora_B(self.lora_A(x.float())) * self.scaling
        return result.to(dtype)


def add_adapters(model: nn.Module, rank: int) -> None:
    """Freeze `model` and add adapters to the layers that peft would choose.

    Of models that peft does not know all linear layers but the output's get one, as with peft's "all-linear". Raises
    RequestError where there is none.
    """
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    wanted = TARGETS.get(kind)
    kept = heads(model)
    layers = {name: layer for name, layer in linear_layers(model) if wanted is not None or layer not in kept}
    layers |= {name: layer for name, layer in model.named_modules() if isinstance(layer, Quantized)}
    if wanted is not None:
        layers = {name: layer for name, layer in layers.items() if name.rpartition(".")[2] in wanted}
    if not layers:
        raise RequestError(f"{type(model).__name__} has no linear layers that LoRA could adapt; leave lora= out")
    model.requires_grad_(False)
    for name, layer in layers.items():
        replace_layer(model, name, Adapted(layer, rank))
