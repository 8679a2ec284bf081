"""A model as a recipe has it, on the device, and what is set in torch while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.estimation.recipe import Recipe
from overspill.models.step import whole_dtype

from .adapters import add_adapters
from .checkpointing import checkpoint_blocks
from .quantized import quantize_weights
from .tensor_parallel import split_layers
from .wrappers import data_parallel

# cuDNN's kernel keeps the same tensors for backward as flash attention does (see capture/fake_cuda/attention.py).
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_ATTENTION_OPS = (
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention", "_safe_softmax"
)  # fmt: skip


def prepared(module: nn.Module, recipe: Recipe, recorder: Recorder) -> nn.Module:
    """`module` as `recipe` has it, on the device but for pp. Raises RequestError where that cannot be done to it."""
    options = _conversion(module, recipe)
    if recipe.parallel is not None and recipe.parallel.kind == "tp":
        split_layers(module, recipe.parallel.gpus)
    if recipe.quantize or recipe.lora:
        module = module.to(**options)  # on the host: what is added has dtypes of its own
        options = {}
    if recipe.quantize:
        quantize_weights(module, recipe.quantize, _compute_dtype(recipe.dtype))
    if recipe.lora:
        add_adapters(module, recipe.lora)
    if recipe.checkpointing:
        checkpoint_blocks(module, () if isinstance(recipe.checkpointing, bool) else recipe.checkpointing)
    if recipe.parallel is not None and recipe.parallel.kind == "pp":
        return module.to(**options) if options else module
    if recipe.parallel is None or recipe.parallel.kind == "tp":
        module = module.to("cuda", **options)
    else:
        module = data_parallel(module.to(**options) if options else module, recipe.parallel, recorder)
    recorder.mark_module(module)
    return module


def _compute_dtype(dtype: str) -> torch.dtype:
    """What products with quantised weights are in."""
    if dtype.startswith("amp"):
        return torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16
    return whole_dtype(dtype) or torch.float32


def _conversion(module: nn.Module, recipe: Recipe) -> dict[str, Any]:
    """What `module.to` is given besides the device."""
    options: dict[str, Any] = {}
    plain = whole_dtype(recipe.dtype)
    if plain is not None:
        options["dtype"] = plain
    if recipe.channels_last:
        if {4} != {parameter.dim() for parameter in module.parameters() if parameter.dim() > 3}:
            raise RequestError(
                f"{type(module).__name__} has no convolutions of images to lie channels-last; leave channels_last= out"
            )
        options["memory_format"] = torch.channels_last
    return options


def on_device(value: Any, recipe: Recipe) -> Any:
    """`value` with every tensor on the device, floating ones in the recipe's dtype, images in its memory format."""
    if isinstance(value, Tensor):
        options: dict[str, Any] = {"dtype": whole_dtype(recipe.dtype)} if value.is_floating_point() else {}
        if recipe.channels_last and value.dim() == 4:
            options["memory_format"] = torch.channels_last
        return value.to("cuda", **options)
    if isinstance(value, dict):
        return {name: on_device(item, recipe) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([on_device(item, recipe) for item in value])
    return value


def surroundings(program: Callable[[Recorder], None], recipe: Recipe) -> Callable[[Recorder], None]:
    """`program` under what the recipe sets in torch for the whole of it."""
    if recipe.attention is None and not recipe.cudnn_benchmark:
        return program

    def surrounded(recorder: Recorder) -> None:
        kernels = nullcontext() if recipe.attention is None else sdpa_kernel(_KERNELS[recipe.attention])
        with kernels, torch.backends.cudnn.flags(enabled=True, benchmark=recipe.cudnn_benchmark):
            program(recorder)
        if recipe.attention is not None and not recorder.has_run(*_ATTENTION_OPS):
            raise RequestError(
                f"the model calls no scaled_dot_product_attention, which attention={recipe.attention} would be for; leave it out"
            )

    return surrounded
