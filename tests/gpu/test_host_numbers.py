"""Tensors of the host in a GPU's step: numbers of a distribution, lengths of sounds, no inputs. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.runtime.transfer.pinned_store import PinnedStore

pytestmark = pytest.mark.gpu


def likelihood(model: nn.Module, x: Tensor) -> Tensor:
    """Of a distribution whose mean and deviation are numbers on the host."""
    return -torch.distributions.Normal(0.0, 1.0, validate_args=False).log_prob(model(x)).mean()


def ctc(model: nn.Module, x: Tensor) -> Tensor:
    """With its lengths on the host, as they come from a loader."""
    lengths, letters = torch.full((4,), 8), torch.full((4,), 3)
    targets = torch.ones(4, 3, dtype=torch.long, device=x.device)
    return F.ctc_loss(model(x).log_softmax(-1).transpose(0, 1), targets, lengths, letters)


@pytest.mark.parametrize(("loss", "whole_step"), [(likelihood, True), (likelihood, False), (ctc, True)])
def test_numbers_of_the_host_stay_there(loss: Callable[..., Tensor], whole_step: bool) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 8, 32, device="cuda")
    if whole_step:
        step = overspill.train_step(model, loss, optimizer, budget="smallest")
        of_step = [step(x) for _ in range(3)]
    else:
        compiled = overspill.compile(loss, budget="smallest")
        of_step = [compiled(model, x) for _ in range(3)]
        of_step[-1].backward()
    assert all(value.is_cuda for value in of_step)


def test_a_graph_that_makes_all_that_it_has_runs_where_it_makes_that() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(32, 512), nn.Linear(512, 32)

        def forward(self, x: Tensor) -> Tensor:
            shift = torch.zeros(32, device=x.device) + 1
            torch._dynamo.graph_break()
            return self.out(torch.relu(self.into(x + shift)))

    session = overspill.Session(budget="1GiB", reserve="1MiB", policy="vdnn-all")
    compiled = overspill.compile(Broken().cuda(), session=session)
    compiled(torch.randn(4096, 32, device="cuda")).sum().backward()
    assert sum(plan.offloaded_bytes for plan in session.plans)
    assert session.engine is not None
    assert isinstance(session.engine.store, PinnedStore)


def test_a_graph_of_the_hosts_numbers_opens_no_store_for_the_gpus() -> None:
    class Indexed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(32, 512), nn.Linear(512, 32)

        def forward(self, x: Tensor) -> Tensor:
            rows = torch.arange(x.shape[0]) * 1
            torch._dynamo.graph_break()
            return self.out(torch.relu(self.into(x[rows.to(x.device)])))

    session = overspill.Session(budget="1GiB", reserve="1MiB", policy="vdnn-all", store="pinned")
    compiled = overspill.compile(Indexed().cuda(), session=session)
    compiled(torch.randn(4096, 32, device="cuda")).sum().backward()
    assert sum(plan.offloaded_bytes for plan in session.plans)
    assert session.engine is not None
    assert isinstance(session.engine.store, PinnedStore)
