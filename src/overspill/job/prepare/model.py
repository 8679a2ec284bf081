"""Apply a job's dtype, memory format, quantisation, adapters and checkpointing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from overspill.core import Device
from overspill.core.errors import RequestError
from overspill.job.job import Job
from overspill.models.built_model import IGNORED
from overspill.models.step import convert, whole_dtype

from .adapters import add_adapters, upcast
from .checkpointing import checkpoint_blocks
from .linear import heads
from .objectives import REFERENCE, reference_of
from .quantized import quantize_weights

# cuDNN's kernel keeps the same tensors for backward as flash attention does (see capture/fake_cuda/attention.py).
_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
EAGER = "eager"
"""Attention written out as separate ops, as transformers has it too."""


def prepare(module: nn.Module, job: Job) -> None:
    """Change `module`, on the host, by the job's options. Raises RequestError if one does not apply to it."""
    if job.channels_last and {4} != {parameter.dim() for parameter in module.parameters() if parameter.dim() > 3}:
        raise RequestError(
            f"{type(module).__name__} has no convolutions of images to lie channels-last; leave channels_last= out",
            fields=["channels_last"],
        )
    dtype, memory_format = whole_dtype(job.dtype), torch.channels_last if job.channels_last else None
    if dtype is not None or memory_format is not None:
        convert(module, dtype, memory_format)
    _as_transformers(module, job)
    if said := job.quantization:
        quantize_weights(module, said, getattr(torch, said.compute) if said.compute else _compute_dtype(job.dtype))
        if job.trains and job.upcast is not False:
            upcast(module)
    reference = reference_of(module) if job.objective else None
    if job.lora:
        add_adapters(module, job.lora, job.lora_targets, job.lora_dropout)
    if job.trains and not any(parameter.requires_grad for parameter in module.parameters()):
        raise RequestError(
            f"{type(module).__name__} has no parameter that requires a gradient, so there is nothing to train; let "
            "one, or add lora=",
            fields=["lora"],
        )
    if job.checkpointing:
        classes = () if isinstance(job.checkpointing, bool) else job.checkpointing
        checkpoint_blocks(module, classes, reentrant=bool(job.reentrant))
    if job.loss_chunks:
        _loss_in_chunks(module, job.loss_chunks)
    if reference is not None and not job.lora:
        module.add_module(REFERENCE, reference)


def _as_transformers(module: nn.Module, job: Job) -> None:
    """Apply options of transformers' models alone: eager attention, and their loss. Raises RequestError for others."""
    if job.attention == EAGER:
        if not hasattr(module, "set_attn_implementation"):
            raise RequestError(
                f"attention=eager: {type(module).__name__} is no model of transformers, which alone has its attention "
                "spelt out "
                "too; take math, or leave it out",
                fields=["attention"],
            )
        module.set_attn_implementation(EAGER)
    for name in job.changed("shift_logits", "loss_chunks"):
        if getattr(module, "loss_type", "") != "ForCausalLM":
            raise RequestError(
                f"{name}=: {type(module).__name__} is no causal language model of transformers; leave it out",
                fields=[name],
            )
    if job.shift_logits:
        module.loss_function = _loss_of_shifted_logits


def _loss_of_shifted_logits(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """Return the loss of transformers/loss/loss_utils.py of 4.46 to 4.49, `ForCausalLMLoss`."""
    logits = logits.float()
    shifted = logits[..., :-1, :].contiguous()
    return F.cross_entropy(shifted.view(-1, vocab_size), labels[..., 1:].contiguous().view(-1))


def _loss_in_chunks(module: nn.Module, chunks: int) -> None:
    """Make the output layer return its input, and the loss run the layer for a chunk of tokens at a time.

    Raises RequestError for a model that does more than scale its logits.
    """
    if getattr(module.config, "final_logit_softcapping", None):
        raise RequestError(
            f"loss_chunks=: {type(module).__name__} bends its logits before the loss; leave it out",
            fields=["loss_chunks"],
        )
    (head,) = heads(module)
    kind: Any = type(head)

    def loss_of(hidden: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(kind.forward(head, hidden).float(), targets, reduction="sum")

    # `logits` is the name that transformers gives what the layer has returned.
    def loss(logits: Tensor, labels: Tensor, **_: Any) -> Tensor:
        targets = F.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
        parts = zip(logits.flatten(0, 1).chunk(chunks), targets.chunk(chunks), strict=True)
        summed = torch.stack([checkpoint(loss_of, *part, use_reentrant=False) for part in parts]).sum()
        return summed / (targets != IGNORED).sum()

    head.__class__ = type(kind.__name__, (kind,), {"forward": lambda _, hidden: hidden, "__module__": kind.__module__})
    module.loss_function = loss


def prepared_batch(value: Any, job: Job, **to: Any) -> Any:
    """Return a batch on its device, in the job's dtype and memory format.

    Every tensor in `value` is moved by `to`. Floating ones get the dtype, images the memory format.
    """
    if isinstance(value, Tensor):
        options = to | ({"dtype": whole_dtype(job.dtype)} if value.is_floating_point() else {})
        if job.channels_last and value.dim() == 4:
            options["memory_format"] = torch.channels_last
        return value.to(**options) if any(option is not None for option in options.values()) else value
    if isinstance(value, dict):
        return {name: prepared_batch(item, job, **to) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([prepared_batch(item, job, **to) for item in value])
    return value


@contextmanager
def attention_kernel(job: Job) -> Iterator[None]:
    """Allow only the job's attention kernel inside the block. Raises RequestError if it does not suit a call."""
    if job.attention in (None, EAGER):
        yield
        return
    try:
        with sdpa_kernel(_KERNELS[job.attention]):
            yield
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise RequestError(
            f"attention={job.attention}: that kernel does not take the model's attention, with its dtype, dropout, "
            "mask or sizes; "
            "leave it out",
            fields=["attention"],
        ) from None


def check_attention(job: Job, device: Device, run: Callable[[], Any]) -> None:
    """Raise RequestError if the job's attention kernel cannot be used.

    That is so if `device` has no such kernel, or if `run`, on fake tensors, calls no attention that could use it. Run
    it in `attention_kernel`.
    """
    if job.attention == EAGER:
        return
    if device.kind == "cpu" and job.attention in ("efficient", "cudnn"):
        raise RequestError(
            f"attention={job.attention}: a kernel of GPUs, and device={device.name} is none; take flash or math",
            fields=["attention"],
        )
    seen = _Calls()
    with seen:
        run()
    if F.scaled_dot_product_attention not in seen.functions:
        raise no_attention(job)


def no_attention(job: Job) -> RequestError:
    """Return the error for a model without attention that the kernel is for."""
    return RequestError(
        f"the model calls no scaled_dot_product_attention, which attention={job.attention} would be for; leave it out",
        fields=["attention"],
    )


class _Calls(TorchFunctionMode):
    """Records which functions of torch are called."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: set[Any] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.add(function)
        return function(*args, **(kwargs or {}))


def _compute_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of products with quantised weights."""
    if dtype.startswith("amp"):
        return torch.bfloat16 if dtype == "amp-bfloat16" else torch.float16
    return whole_dtype(dtype) or torch.float32
