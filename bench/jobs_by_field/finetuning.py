"""Fine-tuning: adapters, checkpoints, mixed precision, gradients that are accumulated and clipped."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .job import job
from .language import HF, llama, own_loss, texts
from .ways import Steps, Way

PEFT = (*HF, "peft")


def with_lora(model: nn.Module, dropout: float = 0.0, targets: str | list[str] = "all-linear") -> nn.Module:
    """`model` with adapters of rank 4."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=targets, lora_dropout=dropout)
    return peft.get_peft_model(model, config)


@job("Llama with LoRA", needs=PEFT)
def llama_lora(way: Way) -> Steps:
    return way.train(with_lora(llama()), own_loss, texts())


@job("Llama with LoRA and its dropout, gradient checkpointing, a padding mask", needs=PEFT)
def llama_lora_checkpointed(way: Way) -> Steps:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return way.train(with_lora(model, 0.05, ["q_proj", "v_proj"]), own_loss, texts("padded"))


@job("Llama, gradient checkpointing", needs=HF)
def llama_checkpointed(way: Way) -> Steps:
    model = llama(use_cache=False)
    model.gradient_checkpointing_enable()
    return way.train(model, own_loss, texts())


@job("Llama in bfloat16 by autocast", needs=HF)
def llama_autocast(way: Way) -> Steps:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return own_loss(model, batch)

    return way.train(llama(), loss, texts())


@job("Llama, gradients accumulated over two micro-batches and clipped", needs=HF)
def llama_accumulated(way: Way) -> Steps:
    step = way.step(llama(), own_loss, clip=0.5, accumulate=2)
    for batch in texts():
        yield step(batch)
