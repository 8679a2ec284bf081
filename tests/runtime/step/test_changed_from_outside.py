"""A model whose parameters or state are changed behind the back of its step: refused, noticed or taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.plus import Plus, batch, made, step_of
from tests.runtime.step.whole_steps import Mlp, Pair
from torch import Tensor, nn

from overspill.core.errors import RequestError

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


WRITTEN: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda w: w.zero_(), "masked_fill_": lambda w: w.masked_fill_(w > 0, 0), "constant_": lambda w: nn.init.constant_(w, 0.5),
    "data.zero_": lambda w: w.data.zero_(), "detach().zero_": lambda w: w.detach().zero_(), "rows": lambda w: w[1:].fill_(2),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_through_a_reference_to_what_is_away_counts(name: str) -> None:
    pair = Pair(Mlp)
    held, plain = pair.model.middle[0].weight, pair.plain.model.middle[0].weight
    pair.train()
    assert pair.step._state.residency["model.middle.0.weight"].away
    with torch.no_grad():
        WRITTEN[name](held)
        WRITTEN[name](plain)
    pair.train()
    pair.assert_same()


def test_a_write_past_the_guard_raises() -> None:
    pair = Pair(Mlp)
    pair.train()
    resident = pair.step._state.residency["model.middle.0.weight"]
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(RuntimeError, match="data pointer"):
        resident.tensor.data.zero_()
    pair.train()
    pair.assert_same()
