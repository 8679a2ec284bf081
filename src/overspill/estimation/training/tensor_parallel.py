"""Tensor parallelism: linear layers cut among GPUs.

The model's plan (`_tp_plan`, as in transformers) cuts them by columns or by rows. The cuts follow Megatron-LM (Shoeybi
et al., 2019, §3) and transformers (integrations/tensor_parallel.py). A layer cut by columns makes some of the features.
The next layer, cut by rows, reads those. Its output is summed up in place, as is the gradient of the first layer's
input. An embedding is cut by rows where the plan says so. All GPUs read the same batch.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.job.prepare.linear import heads, replace_layer

_COLUMNS, _ROWS, _GATHERED = "colwise", "rowwise", ("colwise_gather_output", "colwise_rep")
_EMBEDDING = "embedding_rowwise"
_WHOLE = ("replicated_with_grad_allreduce", "replicate")


def split_layers(model: nn.Module, gpus: int) -> None:
    """Cut the linear layers of `model` for one of `gpus` GPUs.

    Raises RequestError for an unknown style of cut.
    """
    plan = _plan(model)
    tied = {layer for layer in heads(model) if _shared(model, layer)}
    shards: dict[int, nn.Parameter] = {}
    for name, layer in list(model.named_modules()):
        style = next((style for pattern, style in plan.items() if re.fullmatch(pattern, name)), None)
        if style is None or style in _WHOLE or (layer in tied and id(layer.weight) not in shards):
            continue
        # Cut the layer, and share the shard of a tied weight.
        known = (_EMBEDDING,) if isinstance(layer, nn.Embedding) else (_COLUMNS, _ROWS, *_GATHERED)
        if not isinstance(layer, (nn.Linear, nn.Embedding)) or style not in known:
            raise RequestError(
                f"{name} of {type(model).__name__} is to be cut as {style}, which is not known here; take another kind "
                "than tp"
            )
        shard = _cut(name, layer, style, gpus)
        shard.weight = shards.setdefault(id(layer.weight), shard.weight)
        wrapped = _Looked(shard) if isinstance(shard, nn.Embedding) else shard
        replace_layer(model, name, _Gathered(shard, gpus) if style in _GATHERED else wrapped)


def _plan(model: nn.Module) -> dict[str, str]:
    """Return the style of cut of each layer, by name patterns."""
    config: Any = getattr(model, "config", None)
    base: dict[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    prefix: Any = getattr(model, "base_model_prefix", "")
    inner = f"{prefix}." if prefix and hasattr(model, prefix) else ""
    own: dict[str, str] = getattr(model, "_tp_plan", None) or {}
    named = {inner + name: style for name, style in base.items()} | own
    if not named:
        raise RequestError(
            f"{type(model).__name__} has no tensor-parallel plan; the built-in decoder and many models of transformers "
            "do; take one of them, or another kind than tp"
        )
    return {re.escape(name).replace(r"\*", r"\d+"): style for name, style in named.items()}


def _shared(model: nn.Module, layer: nn.Module) -> bool:
    return any(m.weight is layer.weight for m in model.modules() if isinstance(m, nn.Embedding))


def _cut(name: str, layer: nn.Linear | nn.Embedding, style: str, gpus: int) -> nn.Linear | nn.Embedding:
    """Return one GPU's part of the layer."""
    if isinstance(layer, nn.Embedding):
        if layer.num_embeddings % gpus:
            raise RequestError(
                f"{name} has {layer.num_embeddings} rows, which {gpus} GPUs cannot share evenly; take a number that "
                "divides them"
            )
        return nn.Embedding(layer.num_embeddings // gpus, layer.embedding_dim, dtype=layer.weight.dtype)
    read, made = layer.in_features, layer.out_features
    if (read if style == _ROWS else made) % gpus:
        raise RequestError(
            f"{name} has {read} to {made} features, which {gpus} GPUs cannot share evenly; take a number that divides "
            "them"
        )
    sizes = (read // gpus, made) if style == _ROWS else (read, made // gpus)
    shard = nn.Linear(*sizes, bias=layer.bias is not None, dtype=layer.weight.dtype)
    shard.requires_grad_(layer.weight.requires_grad)
    return shard


class _Looked(nn.Module):
    """An embedding cut by rows.

    Rows on other GPUs are zero before the sum.
    """

    def __init__(self, shard: nn.Embedding) -> None:
        super().__init__()
        self.shard = shard

    @property
    def weight(self) -> Tensor:
        """The shard of the weight."""
        return self.shard.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the rows of `tokens`."""
        of_other_ranks = tokens >= self.shard.num_embeddings
        made: Tensor = self.shard(tokens.masked_fill(of_other_ranks, 0))
        return made.masked_fill_(of_other_ranks.unsqueeze(-1), 0)


class _Gathered(nn.Module):
    """A layer cut by columns whose output is gathered."""

    def __init__(self, shard: nn.Module, gpus: int) -> None:
        super().__init__()
        self.shard, self.gpus = shard, gpus

    @property
    def weight(self) -> Tensor:
        """The shard of the weight."""
        found: Any = self.shard.weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        """Return the features of all GPUs."""
        made: Tensor = _Gather.apply(self.shard(x), self.gpus)
        return made


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gpus: int) -> Tensor:
        """Return one tensor, to which the buffers of all parts are copied."""
        ctx.gpus = gpus
        return torch.cat([torch.empty_like(x) for _ in range(gpus)], -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return this GPU's part."""
        return grad.chunk(ctx.gpus, -1)[0].contiguous(), None
