"""`placement=` of a session: plans that lie within the budget, and steps that the allocator is told of."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overspill
from overspill.core.errors import RequestError
from overspill.placement.packing import solver_named
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.need import placed_live
from overspill.runtime.live.planned_steps import PlannedSteps, PoolPhase


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def test_a_plan_stays_within_the_budget_where_it_is_placed() -> None:
    model = net()
    managed = overspill.compile(model, budget=0.9, placement="planned", store="host")
    torch.optim.SGD(model.parameters(), lr=0.1)
    managed(torch.randn(4096, 64)).sum().backward()
    (plan,) = managed.overspill.plans
    budget = int(0.9 * plan.unmanaged_peak_bytes)
    assert plan.peak_bytes <= placed_live(plan, "planned", budget).peak_bytes <= budget
    torch._dynamo.reset()


def test_every_training_step_is_told_to_the_live_allocator_and_evaluation_is_not() -> None:
    model = net()
    managed = overspill.compile(model, store="host")
    session = managed.overspill
    session.steps = PlannedSteps(LiveAllocator("simulated"), solver_named())
    phases = []
    for _ in range(5):
        managed(torch.randn(32, 64)).sum().backward()
        session.steps.allocator.free(session.steps.allocator.allocate(4096))
        phases.append(session.steps.phase)
        with torch.no_grad():
            managed(torch.randn(32, 64))
    assert phases == [PoolPhase.WARM_UP, PoolPhase.RECORDING, PoolPhase.RECORDING, PoolPhase.PLANNED, PoolPhase.PLANNED]
    assert session.steps.allocator.statistics().planned == 2
    torch._dynamo.reset()


def test_an_unknown_placement_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="'pytroch'"):
        overspill.compile(net(), placement="pytroch")
