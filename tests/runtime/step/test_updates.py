"""The optimizer's part of a whole step, by itself."""

from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.runtime import optimizers
from overspill.runtime.step.updates import OptimizerUpdates, as_on


def test_a_new_group_is_known_by_its_own_settings_though_it_lies_where_a_freed_one_lay() -> None:
    parameter = nn.Parameter(torch.zeros(3, 2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    updates = OptimizerUpdates(optimizer)
    kept = []
    for momentum in (0.0, 0.9) * 4:
        optimizer.param_groups[0] = group = {**optimizer.param_groups[0], "momentum": momentum}
        kept.append(list(updates.needs_of(parameter, group, parameter).leaves))
        del group
    assert kept == [[], ["momentum_buffer"]] * 4


def test_an_optimizer_is_tried_on_the_path_that_cuda_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA several tensors go through one kernel, with other temporaries than one after the other."""
    monkeypatch.setattr(optimizers, "_MEASURED", {})  # what another test has measured is measured again
    parameter = nn.Parameter(torch.zeros(64, 48))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    (group,) = optimizer.param_groups

    class OnCuda:
        dtype, device = torch.float32, torch.device("cuda")

        @staticmethod
        def dim() -> int:
            return 2

    def share(like: Any, **settings: Any) -> float:
        return OptimizerUpdates(optimizer)._probe(like, as_on(like.device, {**group, **settings})).share

    assert share(OnCuda) == share(parameter, foreach=True) != share(parameter)
    assert share(OnCuda, foreach=False) == share(parameter)
    assert as_on(torch.device("cuda"), group)["foreach"]
    assert not as_on(torch.device("cuda"), {**group, "lr": torch.tensor(0.1)})["foreach"]
    assert not as_on(torch.device("cuda"), {**group, "fused": True})["foreach"]
    factored = torch.optim.Adafactor([nn.Parameter(torch.zeros(1))]).param_groups[0]
    assert not as_on(torch.device("cuda"), factored)["foreach"]


def test_a_default_device_is_not_that_of_the_step() -> None:
    """As in a script that begins with `torch.set_default_device("cuda")`; here a device that has no numbers."""

    def losses(*, managed: bool) -> list[float]:
        with torch.device("cpu"):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8))
            x, y = torch.randn(32, 8), torch.randn(32, 8)
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if torch.__version__ >= "2.13":  # before, AdamW makes its steps on the default device
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if managed:
            step = overspill.train_step(model, nn.MSELoss(), optimizer, store="host", budget="smallest")
            found = [step(x, y).item() for _ in range(3)]
            step.close()
            return found
        found = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    torch.set_default_device("meta")
    try:
        assert losses(managed=True) == losses(managed=False)
    finally:
        torch.set_default_device(None)
