"""Real training steps on the CPU from our pools: the same bits, within the budget, through squeeze and restart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import InfeasibleBudget, RequestError
from overspill.job import Job
from overspill.models import load
from overspill.runtime.live.pools import check_live
from overspill.runtime.options import LIVE_PLACEMENTS, Options
from overspill.runtime.training import train, train_plain

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

MIB = 1 << 20


def every_placement_quickly(quick: str) -> pytest.MarkDecorator:
    """Every placement, all but `quick` in the long suite."""
    return pytest.mark.parametrize(
        "placement", [pytest.param(name, marks=() if name == quick else pytest.mark.long) for name in LIVE_PLACEMENTS]
    )


def net() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(256, 10))


def data(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 256, generator=made), torch.randint(10, (rows,), generator=made)


def loop(model: nn.Module, loss_of: Callable[..., Tensor], sizes: list[int]) -> tuple[list[float], dict[str, Tensor]]:
    """What a plain loop gives, where `loss_of` is the model, compiled or not."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    losses = []
    for seed, rows in enumerate(sizes):
        inputs, labels = data(rows, seed)
        optimizer.zero_grad()
        loss = F.cross_entropy(loss_of(inputs), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, copy.deepcopy(model.state_dict())


def whole(model: nn.Module, sizes: list[int], **asked: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    """The same by `train_step`; and its report of the pool."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    torch.manual_seed(1)
    step = overspill.train_step(model, nn.CrossEntropyLoss(), optimizer, store="host", **asked)
    losses = [float(step(*data(rows, seed))) for seed, rows in enumerate(sizes)]
    report = step.pool
    step.close()
    return losses, copy.deepcopy(model.state_dict()), report


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


@every_placement_quickly("virtual")
def test_a_compiled_model_trains_from_the_pool_with_the_same_bits(placement: str) -> None:
    sizes = [2048] * 5
    expected, state = loop(plain := net(), plain, sizes)
    budget = 40 * MIB
    managed = overspill.compile(model := net(), budget=str(budget), store="host", placement=placement)
    losses, found = loop(model, managed, sizes)
    assert losses == expected
    assert same(found, state)
    (plan,) = managed.overspill.plans
    assert plan.peak_bytes < plan.unmanaged_peak_bytes
    pool = managed.overspill.pool
    assert pool.name == placement
    assert 0 < pool.peak_bytes <= pool.capacity_bytes < budget
    assert pool.served_share > 0.5
    if placement == "two-ended":
        assert pool.squeezes == 1


@pytest.mark.long
@every_placement_quickly("two-ended")
def test_a_whole_step_trains_from_the_pool_with_the_same_bits(placement: str) -> None:
    sizes = [2048] * 5
    expected, state = loop(plain := net(), plain, sizes)
    losses, found, pool = whole(net(), sizes, budget="32MiB", placement=placement)
    assert losses == expected
    assert same(found, state)
    assert 0 < pool.peak_bytes <= pool.capacity_bytes < 32 * MIB
    assert pool.served_share > 0.9


@pytest.mark.long
def test_a_larger_batch_is_begun_again_with_beta_more_and_the_bits_are_those_of_plain_training() -> None:
    """Dymem's trial and error for real: squeezed to a small batch, the main space has no room for a larger one."""
    sizes = [512, 512, 2048, 2048, 512]
    expected, state = loop(plain := net(), plain, sizes)
    losses, found, pool = whole(net(), sizes, budget="64MiB", placement="two-ended")
    assert losses == expected  # dropout's random numbers too
    assert same(found, state)  # and batch norm's statistics, which a step begun again must not have moved
    assert pool.squeezes == 1
    assert pool.restarts > 0
    assert pool.main_bytes <= pool.capacity_bytes < 64 * MIB


@pytest.mark.long
def test_compiled_models_go_on_beside_the_main_space_and_have_more_in_the_next_step() -> None:
    sizes = [512, 512, 2048, 2048, 2048]
    expected, state = loop(plain := net(), plain, sizes)
    managed = overspill.compile(model := net(), budget="64MiB", store="host", placement="two-ended")
    losses, found = loop(model, managed, sizes)
    assert losses == expected
    assert same(found, state)
    pool = managed.overspill.pool
    assert pool.squeezes == 1
    assert pool.overflows > 0
    assert pool.restarts == 0


@pytest.mark.long
@pytest.mark.parametrize("placement", ["two-ended", "virtual"])
def test_inductors_kernels_run_from_the_pool(placement: str) -> None:
    job = Job(lambda: load("gpt2", small=True), 4)
    options = Options(budget="64MiB", store="host", placement=placement, backend="inductor", partition=1)
    managed = train(job, options)
    assert managed.identical_to(train_plain(job, options, partition=1))
    assert managed.pool is not None
    assert managed.pool.served_share is not None
    assert managed.pool.served_share > 0.5


def test_a_budget_in_which_the_pool_does_not_hold_the_plan_is_refused_with_the_least_that_would_do() -> None:
    managed = overspill.compile(net(), budget="10MiB", store="host", placement="virtual")
    with pytest.raises(InfeasibleBudget, match="infeasible"):
        managed(data(2048, 0)[0]).sum().backward()


def test_what_cannot_work_together_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"placement='two-ended' .*backend='inductor'"):
        check_live("two-ended", "inductor", torch.device("cuda"))
    with pytest.raises(RequestError, match=r"placement='virtual' .*for meta"):
        check_live("virtual", "eager", torch.device("meta"))
    session = overspill.Session(placement="virtual", store="host")
    model = net()
    with pytest.raises(RequestError, match="compiled models"):
        overspill.train_step(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), session=session)


@pytest.mark.long
def test_a_first_step_that_finds_no_room_is_begun_again_too() -> None:
    """On the CPU the pool is made while the first step runs. Scratch of U-Net's convolutions has no room there."""
    job = Job(lambda: load("unet", small=True), 16, "momentum")
    options = Options(budget="90%", store="host", placement="two-ended", whole_step=True)
    run = train(job, options, steps=2)
    assert run.pool is not None
    assert run.pool.spilled_peak_bytes > 0
    assert run.identical_to(train_plain(job, options, steps=2))
