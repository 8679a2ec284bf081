"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .finetuning import mean_square
from .job import job
from .language import HF, own_loss, sizes, texts
from .ways import Steps, Way


class Routed(nn.Module):
    """Rows go to experts, in a loop with nonzero()."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(32, 4), nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        made = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().squeeze(1)
            made = made.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return made


@job("mixture of experts: a loop with nonzero()")
def experts_loop(way: Way) -> Steps:
    return way.train(Routed(), mean_square, [torch.randn(64, 32) for _ in range(3)])


class Switch(nn.Module):
    """One expert a row, each with room for so many, and a loss that balances them."""

    def __init__(self, experts: int = 4, capacity: int = 24) -> None:
        super().__init__()
        self.capacity = capacity
        self.gate = nn.Linear(32, experts)
        self.into = nn.Parameter(torch.randn(experts, 32, 64) * 0.1)
        self.out = nn.Parameter(torch.randn(experts, 64, 32) * 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(-1)
        weight, chosen = shares.max(-1)
        one_hot = F.one_hot(chosen, shares.shape[1])
        place = ((one_hot.cumsum(0) - 1) * one_hot).sum(-1)
        fits = place < self.capacity
        slots = x.new_zeros(shares.shape[1], self.capacity + 1, 32)
        slots = slots.index_put((chosen, place.clamp(max=self.capacity)), x)
        worked = torch.bmm(F.gelu(torch.bmm(slots, self.into)), self.out)
        made = worked[chosen, place.clamp(max=self.capacity)] * (weight * fits)[:, None]
        return made, (one_hot.float().mean(0) * shares.mean(0)).sum() * shares.shape[1]


@job("mixture of experts with capacities and a loss that balances them (Switch)")
def experts_switch(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        made, balance = model(x)
        return made.square().mean() + 0.01 * balance

    return way.train(Switch(), loss, [torch.randn(64, 32) for _ in range(3)])


@job("Qwen3-MoE", needs=HF)
def qwen3_moe(way: Way) -> Steps:
    import transformers

    config = transformers.Qwen3MoeConfig(
        **sizes(), num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16
    )
    return way.train(transformers.Qwen3MoeForCausalLM(config), own_loss, texts())


@job("Mixtral, a padding mask", needs=HF)
def mixtral(way: Way) -> Steps:
    import transformers

    config = transformers.MixtralConfig(**sizes(), num_key_value_heads=2, num_local_experts=4)
    return way.train(transformers.MixtralForCausalLM(config), own_loss, texts("padded"))
