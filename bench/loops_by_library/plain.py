"""Loops of one's own, with ten optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .loop import Line, Trained, loop
from .models import batches, llama

Make = Callable[[Any], Optimizer]
HF = ("transformers",)


def trained(line: Line, make: Make) -> Trained:
    """Forward, backward, clipping and update; the loss is the model's own."""
    original = model = llama()
    optimizer = make(model.parameters())
    model = line.module(model)
    figures = []
    for batch in batches():
        loss = model(**batch).loss
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item()))
    return Trained(figures, [original], [optimizer])


@loop("AdamW", needs=HF)
def plain_adamw(line: Line) -> Trained:
    return trained(line, lambda p: torch.optim.AdamW(p, lr=1e-3))


@loop("AdamW, fused", needs=HF)
def plain_fused(line: Line) -> Trained:
    return trained(line, lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True))


@loop("SGD with momentum", needs=HF)
def plain_sgd(line: Line) -> Trained:
    return trained(line, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))


@loop("Adagrad", needs=HF)
def plain_adagrad(line: Line) -> Trained:
    return trained(line, lambda p: torch.optim.Adagrad(p, lr=1e-3))


@loop("Adafactor of PyTorch", needs=HF)
def plain_adafactor(line: Line) -> Trained:
    return trained(line, lambda p: torch.optim.Adafactor(p, lr=1e-2))


@loop("Adafactor of transformers", needs=HF)
def plain_hf_adafactor(line: Line) -> Trained:
    from transformers.optimization import Adafactor

    return trained(line, lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=False))


@loop("AdamW of schedulefree, with a warm-up", needs=(*HF, "schedulefree"))
def plain_schedulefree(line: Line) -> Trained:
    import schedulefree

    def make(parameters: Any) -> Any:
        optimizer = schedulefree.AdamWScheduleFree(parameters, lr=1e-3, warmup_steps=3)
        optimizer.train()
        return optimizer

    return trained(line, make)


@loop("AdamW8bit of bitsandbytes", needs=(*HF, "bitsandbytes"))
def plain_8bit(line: Line) -> Trained:
    import bitsandbytes as bnb

    return trained(line, lambda p: bnb.optim.AdamW8bit(p, lr=1e-3, min_8bit_size=64))


@loop("Lion of pytorch_optimizer", needs=(*HF, "pytorch_optimizer"))
def plain_lion(line: Line) -> Trained:
    import pytorch_optimizer

    return trained(line, lambda p: pytorch_optimizer.Lion(p, lr=1e-4))


@loop("AdamW with a GradScaler, which skips a step with an infinite loss", needs=HF)
def plain_scaler(line: Line) -> Trained:
    original = model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    model = line.module(model)
    figures = []
    for index, batch in enumerate(batches()):
        loss = model(**batch).loss
        if index == 2:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        figures.append((loss.item(), norm.item(), scaler.get_scale()))
    return Trained(figures, [original], [optimizer])
