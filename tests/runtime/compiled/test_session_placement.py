"""`placement=` of a session: plans that lie within the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import overspill
from overspill.core.errors import RequestError


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
    assert plan.places is not None
    assert plan.peak_bytes == plan.places.total_bytes <= budget
    torch._dynamo.reset()


def test_an_unknown_placement_is_refused_at_once() -> None:
    with pytest.raises(RequestError, match="'pytroch'"):
        overspill.compile(net(), placement="pytroch")
