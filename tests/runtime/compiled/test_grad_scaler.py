"""float16 with a GradScaler: a step whose gradients overflow is skipped, and the next ones are those of plain PyTorch."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.step.whole_steps import differences
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import functional as F

import overspill
from overspill.core.errors import UnsupportedError


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1)) for _ in range(6))
    return nn.Sequential(*layers, nn.Linear(32, 4))


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        return F.cross_entropy(model(x), y)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return torch.randn(64, 32, generator=drawn), torch.randint(0, 4, (64,), generator=drawn)


@pytest.mark.short("True")
@pytest.mark.parametrize("clips", [False, True])
def test_compile_skips_the_steps_that_plain_pytorch_skips(clips: bool) -> None:
    plain = network()
    model = copy.deepcopy(plain)
    compiled = overspill.compile(model, budget="1GiB", store="host", policy="vdnn-all")
    jobs = []
    for trained, called in ((plain, plain), (model, compiled)):
        optimizer = torch.optim.SGD(trained.parameters(), 0.05, momentum=0.9)
        jobs.append((trained, called, optimizer, GradScaler("cpu", init_scale=2.0**18, growth_interval=2)))
    skipped = 0
    for seed in range(8):
        losses = []
        before = copy.deepcopy(plain.state_dict())
        for trained, called, optimizer, scaler in jobs:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            loss = loss_of(called, *batch(seed))
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(trained.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[0] == losses[1]
        assert jobs[0][3].state_dict() == jobs[1][3].state_dict()
        assert differences(plain, jobs[0][2], model, jobs[1][2]) == []
        skipped += all(torch.equal(value, before[name]) for name, value in plain.state_dict().items())
    assert 0 < skipped < 8
    assert compiled.overspill.engine is not None
    assert compiled.overspill.engine.offloaded_bytes > 0


def test_a_whole_step_says_that_it_cannot_skip_and_what_would_work() -> None:
    model, scaler = network(), GradScaler("cpu")
    step = overspill.train_step(
        model, lambda m, x, y: scaler.scale(loss_of(m, x, y)), torch.optim.SGD(model.parameters(), 0.1), budget="1GiB"
    )
    with pytest.raises(UnsupportedError, match=r"GradScaler.*overspill.compile"):
        step(*batch(0))
