"""A model whose parameters or state are changed behind the back of its step: refused, noticed or taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.plus import Plus, batch, made, step_of
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.runtime.training import same_bits

DAMAGE: dict[str, Callable[[Plus], Any]] = {
    "a layer is deleted": lambda m: delattr(m, "linear"),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
    "a new layer": lambda m: setattr(m, "more", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_model_with_other_parameters_is_refused_in_a_line(name: str) -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    DAMAGE[name](model)
    with pytest.raises(RequestError, match="anew") as refusal:
        step(*batch())
    assert "\n" not in str(refusal.value)


def test_amsgrad_switched_on_is_refused_in_a_line() -> None:
    model, _ = made()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step = step_of(model, optimizer)
    step(*batch())
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RequestError, match="max_exp_avg_sq"):
        step(*batch())
    optimizer.param_groups[0]["amsgrad"] = False
    assert step(*batch()).isfinite()


LOST: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda w: w.zero_(), "fill_": lambda w: w.fill_(1), "masked_fill_": lambda w: w.masked_fill_(w != w, 0),
    "constant_": lambda w: nn.init.constant_(w, 0.5), "data.zero_": lambda w: w.data.zero_(), "detach().zero_": lambda w: w.detach().zero_(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_a_write_through_a_reference_to_what_is_away_is_told(name: str) -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    held = model.linear.weight
    before = held.detach().clone()
    state = step._state
    state.residency.send(["model.linear.weight"], state.engine)
    state.arm()
    with torch.no_grad():
        LOST[name](held)
    with pytest.raises(RequestError, match=r"a reference .*synchronize\(\)"):
        step(*batch())
    step.synchronize()
    assert same_bits(held.detach(), before)
    assert step(*batch()).isfinite()


def test_a_write_to_state_that_is_there_is_not_taken_for_one_to_what_is_away() -> None:
    model, _ = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = step_of(model, optimizer)
    step(*batch())
    state = step._state
    state.residency.send(["model.linear.weight.momentum_buffer", "model.linear.bias.momentum_buffer"], state.engine)
    state.arm()
    optimizer.state[model.linear.bias]["momentum_buffer"].zero_()
    assert step(*batch()).isfinite()


def test_data_given_to_what_is_away_is_taken() -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    held, state = model.linear.weight, step._state
    state.residency.send(["model.linear.weight"], state.engine)
    state.arm()
    held.data = torch.zeros(3, 4)
    assert same_bits(model.linear.weight.detach(), torch.zeros(3, 4))
    step(*batch())
    assert held.detach().abs().max() < 1
