"""PyTorch's settings that choose kernels may change between steps, and each step has its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import overspill
from overspill.runtime.reachable import same_bits

Setting = Callable[[], AbstractContextManager[Any]]


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(32, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


SETTINGS: dict[type[nn.Module], Setting] = {
    Attends: lambda: sdpa_kernel(SDPBackend.MATH),
    Remembers: lambda: torch.backends.mkldnn.flags(enabled=False),
}


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return model(x).square().mean()


def trained(settings: list[Setting], model: nn.Module, step: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    found = []
    for setting in settings:
        with setting():
            found.append(step(torch.randn(4, 8, 32)))
        found += [value.clone() for value in model.state_dict().values()]
    return found


def by_hand(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(call, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.short("Attends-False")
@pytest.mark.usefixtures("forget_compiled_code")
@pytest.mark.parametrize(("made", "whole_step"), by_turns(SETTINGS, [False, True]))
def test_kernels_are_those_of_each_step(made: type[nn.Module], whole_step: bool) -> None:
    setting = SETTINGS[made]
    torch.manual_seed(0)
    plain = made()
    model, unset = copy.deepcopy(plain), copy.deepcopy(plain)
    settings = [setting, nullcontext, nullcontext, setting]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if whole_step:
        step = overspill.train_step(model, loss_of, optimizer, budget="1MiB", store="host")
    else:
        step = by_hand(overspill.compile(model, budget="1MiB", optimizer=optimizer, store="host"), optimizer)
    found = trained(settings, model, step)
    expected = trained(settings, plain, by_hand(plain, torch.optim.SGD(plain.parameters(), 0.1)))
    assert all(map(same_bits, found, expected))
    others = trained([nullcontext] * 4, unset, by_hand(unset, torch.optim.SGD(unset.parameters(), 0.1)))
    assert not all(map(same_bits, expected, others)), "the setting chooses other kernels"
