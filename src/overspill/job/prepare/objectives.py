"""Training by preferences, with a frozen reference: DPO (Rafailov et al., 2023) and GRPO (Shao et al., 2024).

The reference is a copy of the model, or with LoRA the model without its adapters, as in TRL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError
from overspill.models.built_model import BuiltModel

BETA = 0.1
"""The weight of the reference: TRL's default for DPO. It does not change what a step takes."""
REFERENCE = "reference"
_LEFT_OUT = "_disable_adapters"
"""An attribute of peft's layers, whose method also turns gradients off."""
_ASSUMED = "an inference engine has no memory on this GPU: leave its share out of the budget"


def with_objective(built: BuiltModel, objective: str) -> BuiltModel:
    """Return `built` with the batches and the loss of `objective`: a sample of DPO is a pair of texts."""
    make_batch, texts = built.make_batch, 2 if objective == "dpo" else 1
    assumed = _ASSUMED if objective == "grpo" else built.assumed
    return replace(built, make_batch=lambda batch: make_batch(texts * batch), loss=_LOSSES[objective], assumed=assumed)


def reference_of(module: nn.Module) -> nn.Module:
    """Return a frozen copy of `module`. Raises RequestError if it is no causal language model of transformers."""
    if getattr(module, "loss_type", "") != "ForCausalLM":
        raise RequestError(
            f"objective=: {type(module).__name__} is no causal language model of transformers; leave it out",
            fields=["objective"],
        )
    # A fake tensor would be copied with all that its mode knows.
    copies: dict[int, Any] = {id(p): nn.Parameter(p.detach().clone(), requires_grad=False) for p in module.parameters()}
    copies |= {id(buffer): buffer.clone() for buffer in module.buffers()}
    return deepcopy(module, copies).eval()


def _dpo(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of pairs, the first half of the texts against the second (DPO, equation 7)."""
    ours, reference = _both(module, input_ids, labels)
    (chosen, rejected), (first, second) = ours.sum(-1).chunk(2), reference.sum(-1).chunk(2)
    return -F.logsigmoid(BETA * ((chosen - rejected) - (first - second))).mean()


def _grpo(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of texts with equal advantages, one update for each generation (GRPO, equations 3 and 4)."""
    ours, reference = _both(module, input_ids, labels)
    ratio, apart = torch.exp(ours - ours.detach()), reference - ours
    return (BETA * (apart.exp() - apart - 1) - ratio).mean()


_LOSSES: dict[str, Callable[..., Tensor]] = {"dpo": _dpo, "grpo": _grpo}


def _both(module: nn.Module, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of tokens by the model and by its reference, which runs first."""
    copy = getattr(module, REFERENCE, None)
    with torch.no_grad():
        if copy is None:
            with _without_adapters(module):
                reference = _log_probabilities(module, input_ids, labels)
        else:
            reference = _log_probabilities(copy, input_ids, labels)
    return _log_probabilities(module, input_ids, labels), reference


def _log_probabilities(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return those of each text's tokens but the first, as `selective_log_softmax` of trl/trainer/utils.py, 0.20."""
    logits: Tensor = module(input_ids=input_ids).logits[:, :-1]
    tokens = labels[:, 1:].unsqueeze(-1)
    if logits.dtype is torch.float32:
        sums = torch.stack([row.logsumexp(-1) for row in logits])
        return logits.gather(-1, tokens).squeeze(-1) - sums
    rows = zip(logits, tokens, strict=True)
    return torch.stack([row.log_softmax(-1).gather(-1, token).squeeze(-1) for row, token in rows])


@contextmanager
def _without_adapters(module: nn.Module) -> Iterator[None]:
    """Leave peft's adapters out inside the block."""
    layers = [layer for layer in module.modules() if hasattr(layer, _LEFT_OUT)]
    for layer in layers:
        setattr(layer, _LEFT_OUT, True)
    try:
        yield
    finally:
        for layer in layers:
            setattr(layer, _LEFT_OUT, False)
