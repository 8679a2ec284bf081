"""A model as a job has it, on the device, and what is set in torch while it is trained."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overspill.capture.recording.recorder import Recorder
from overspill.core.errors import RequestError
from overspill.job import Job
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


def prepared(module: nn.Module, job: Job, recorder: Recorder) -> nn.Module:
    """`module` as `job` has it, on the device but for pp. Raises RequestError where that cannot be done to it."""
    options = _conversion(module, job)
    if job.parallel is not None and job.parallel.kind == "tp":
        split_layers(module, job.parallel.gpus)
    if job.quantize or job.lora:
        module = module.to(**options)  # on the host: what is added has dtypes of its own
        options = {}
    if job.quantize:
        quantize_weights(module, job.quantize, _compute_dtype(job.dtype))
    if job.lora:
        add_adapters(module, job.lora)
    if job.checkpointing:
        checkpoint_blocks(module, () if isinstance(job.checkpointing, bool) else job.checkpointing)
    if job.parallel is not None and job.parallel.kind == "pp":
        return module.to(**options) if options else module
    if job.parallel is None or job.parallel.kind == "tp":
        module = module.to("cuda", **options)
    else:
        module = data_parallel(module.to(**options) if options else module, job.parallel, recorder)
    recorder.mark_module(module)
    return module


def _compute_dtype(dtype: str) -> torch.dtype:
    """What products with quantised weights are in."""
    if dtype.startswith("amp"):
        return torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16
    return whole_dtype(dtype) or torch.float32


def _conversion(module: nn.Module, job: Job) -> dict[str, Any]:
    """What `module.to` is given besides the device."""
    options: dict[str, Any] = {}
    plain = whole_dtype(job.dtype)
    if plain is not None:
        options["dtype"] = plain
    if job.channels_last:
        if {4} != {parameter.dim() for parameter in module.parameters() if parameter.dim() > 3}:
            raise RequestError(
                f"{type(module).__name__} has no convolutions of images to lie channels-last; leave channels_last= out"
            )
        options["memory_format"] = torch.channels_last
    return options


def on_device(value: Any, job: Job) -> Any:
    """`value` with every tensor on the device, floating ones in the job's dtype, images in its memory format."""
    if isinstance(value, Tensor):
        options: dict[str, Any] = {"dtype": whole_dtype(job.dtype)} if value.is_floating_point() else {}
        if job.channels_last and value.dim() == 4:
            options["memory_format"] = torch.channels_last
        return value.to("cuda", **options)
    if isinstance(value, dict):
        return {name: on_device(item, job) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([on_device(item, job) for item in value])
    return value


def surroundings(program: Callable[[Recorder], None], job: Job) -> Callable[[Recorder], None]:
    """`program` under what the job sets in torch for the whole of it."""
    if job.attention is None and not job.cudnn_benchmark:
        return program

    def surrounded(recorder: Recorder) -> None:
        kernels = nullcontext() if job.attention is None else sdpa_kernel(_KERNELS[job.attention])
        with kernels, torch.backends.cudnn.flags(enabled=True, benchmark=job.cudnn_benchmark):
            program(recorder)
        if job.attention is not None and not recorder.has_run(*_ATTENTION_OPS):
            raise RequestError(
                f"the model calls no scaled_dot_product_attention, which attention={job.attention} would be for; leave it out"
            )

    return surrounded
