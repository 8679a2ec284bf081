"""What callbacks log is what the engine moved; the libraries' own are in tests/test_recipes.py."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import overspill
from overspill import callbacks
from overspill.core.units import format_bytes
from overspill.errors import RequestError
from overspill.runtime.step.train_step import TrainStep

BATCH = torch.randn(2048, 64, generator=torch.Generator().manual_seed(0))


class Scalars:
    """Stands for a SummaryWriter."""

    def __init__(self) -> None:
        self.found: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.found.append((name, value, step))


@pytest.fixture(scope="module")
def step() -> Iterator[TrainStep]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    made = overspill.train_step(
        model, lambda net, x: net(x).square().mean(), torch.optim.SGD(model.parameters(), 0.1), budget=0.6, store="host"
    )
    made(BATCH)
    yield made
    made.close()


def test_the_figures_are_of_a_step_on_average(step: TrainStep) -> None:
    figures = callbacks.StepFigures(step)
    figures.take()
    assert step.engine is not None
    before = step.engine.offloaded_bytes
    for _ in range(2):
        step(BATCH)
        figures.step()
    found = figures.take()
    assert found["overspill/offloaded_bytes"] == (step.engine.offloaded_bytes - before) / 2 > 0
    assert found["overspill/planned_peak_bytes"] == step.peak_bytes
    assert found["overspill/step_seconds"] > found["overspill/wait_seconds"] > 0
    figures.step()
    assert figures.take()["overspill/offloaded_bytes"] == 0, "since the last call nothing moved"


def test_a_logger_says_it_each_so_many_steps(step: TrainStep, caplog: pytest.LogCaptureFixture) -> None:
    log = callbacks.StepLogger(step, every=2)
    with caplog.at_level(logging.INFO, logger="overspill"):
        for _ in range(4):
            step(BATCH)
            log()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step 2", "step 4"]
    assert f"planned peak {format_bytes(step.peak_bytes)}, offloaded " in caplog.records[0].message


def test_tensorboard_gets_scalars(step: TrainStep) -> None:
    writer = Scalars()
    write = callbacks.TensorBoardWriter(step, writer, every=1)
    step(BATCH)
    write()
    assert {name for name, _, _ in writer.found} == set(callbacks.figures_of(step))
    assert all(at == 1 and value >= 0 for _, value, at in writer.found)


def test_what_is_compiled_is_found_wherever_it_is() -> None:
    session = overspill.Session(budget="1GiB", store="host")
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    net.forward = overspill.compile(net.forward, session=session)  # type: ignore[method-assign]
    for model in (session, net.forward, net, nn.Sequential(net)):
        assert callbacks.figures_of(model)["overspill/planned_peak_bytes"] == 0
    other = nn.Linear(4, 4)
    other.forward = overspill.compile(other.forward, budget="1GiB")  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="2 sessions"):
        callbacks.figures_of(nn.Sequential(net, other))


def test_what_has_nothing_of_overspill_is_said() -> None:
    with pytest.raises(RequestError, match="Linear"):
        callbacks.figures_of(nn.Linear(2, 2))
    with pytest.raises(RequestError, match="every=0"):
        callbacks.StepLogger(nn.Linear(2, 2), every=0)


@pytest.mark.parametrize(("name", "library"), [("LightningCallback", "lightning"), ("TrainerCallback", "transformers")])
def test_a_library_that_is_not_there_is_named(name: str, library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    for module in ("lightning", "trainer"):
        monkeypatch.delitem(sys.modules, f"overspill.callbacks.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(RequestError, match=f"{library}: pip install"):
        getattr(callbacks, name)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Absent'"):
        callbacks.Absent  # noqa: B018
