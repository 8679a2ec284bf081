"""Kernels of other hands: Triton's, which are compiled and do nothing here, are planned and run; cuDNN's recurrent ones are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import UnsupportedError


class Attends(nn.Module):
    """Attention with a dropout, whose seed backward reads on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.into(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        return self.out(F.gelu(found.transpose(1, 2).flatten(2)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("whole_step", [False, True])
def test_recurrent_layers_of_cudnn_are_refused_with_what_works(
    whole_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *_: None)
    model, x = nn.GRU(16, 16).cuda(), torch.randn(4, 2, 16, device="cuda")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().mean()

    def trained() -> Tensor:
        if whole_step:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            return overspill.train_step(model, loss, optimizer, budget="smallest")(x)
        return loss(overspill.compile(model, budget="smallest"), x)

    with pytest.raises(UnsupportedError, match="cudnn"):
        trained()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    torch._dynamo.reset()
    trained()


@pytest.mark.parametrize("whole_step", [False, True])
def test_programs_of_a_gpu_are_planned(whole_step: bool) -> None:
    model = Attends().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = torch.randn(2, 8, 32, 64, device="cuda")
    if whole_step:
        step = overspill.train_step(model, loss_of, optimizer, budget="smallest", backend="inductor")
        for x in batches:
            step(x)
        (plan, *_) = step.plans
    else:
        compiled = overspill.compile(model, budget="smallest", backend="inductor")
        for x in batches:
            loss_of(compiled, x).backward()
            optimizer.step()
            optimizer.zero_grad()
        (plan, *_) = compiled.overspill.plans
    assert any(op.name.startswith("triton_") for op in plan.graph.ops)
