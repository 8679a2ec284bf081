"""Births and deaths of device memory are those of a real run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.capture.recording.recorded_models import (
    BATCH,
    SMALLEST,
    Meeting,
    Residual,
    Selecting,
    Transposed,
    Twice,
    frozen,
    mlp,
)
from torch import nn

from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.runtime.tracker import LiveBytes

optim = torch.optim
Make = Callable[[], nn.Module]
Optimizer = Callable[[Any], torch.optim.Optimizer]
MODELS: dict[str, Make] = {
    "a perceptron": mlp,
    "residual branches": Residual,
    "gradients that meet": Meeting,
    "linear layers on transposed inputs": Transposed,
    "gathering and maxima": Selecting,
    "a layer used twice, with a tied weight": Twice,
    "frozen layers": frozen,
}
OPTIMIZERS: dict[str, Optimizer] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1, foreach=False),
    "SGD, foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "SGD, fused": lambda p: optim.SGD(p, lr=0.1, fused=True),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "momentum, foreach": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, foreach=True),
    "Adam": lambda p: optim.Adam(p, foreach=False),
    "Adam, foreach": lambda p: optim.Adam(p, foreach=True),
    "Adam, fused": lambda p: optim.Adam(p, fused=True),
    "AdamW, amsgrad, foreach": lambda p: optim.AdamW(p, amsgrad=True, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, foreach=False),
    "Adagrad, foreach": lambda p: optim.Adagrad(p, foreach=True),
    "RMSprop, centered": lambda p: optim.RMSprop(p, centered=True, momentum=0.9, foreach=False),
    "RMSprop, foreach": lambda p: optim.RMSprop(p, foreach=True),
    "Adafactor": lambda p: optim.Adafactor(p, foreach=False),
    "Adafactor, foreach": lambda p: optim.Adafactor(p, foreach=True),
    "Adadelta, foreach": lambda p: optim.Adadelta(p, foreach=True),
    "NAdam, foreach": lambda p: optim.NAdam(p, foreach=True),
    "Adamax": lambda p: optim.Adamax(p, foreach=False),
}
STAGES = ("forward", "backward", "step", "zero_grad") * 2


def stages(make: Make, make_optimizer: Optimizer, device: str) -> Iterator[None]:
    """Two steps of training; it stops after the construction and after each stage."""
    torch.manual_seed(0)
    model = make().to(device)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    x = torch.rand(BATCH, 64).to(device)
    yield
    for _ in range(2):
        loss = model(x).square().mean()
        yield
        loss.backward()
        del loss
        yield
        optimizer.step()
        yield
        optimizer.zero_grad()
        yield


def real(make: Make, make_optimizer: Optimizer) -> list[tuple[int, int]]:
    """By how much memory changes in each stage of a real run on the CPU, and how far it rises, by torch's profiler."""
    run = stages(make, make_optimizer, "cpu")
    next(run)
    found = []
    for _ in STAGES:
        with torch.autograd.profiler.profile(profile_memory=True) as profile:
            next(run)
        events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
        live = peak = 0
        for event in sorted(events, key=lambda e: e.start_ns()):
            if abs(event.nbytes()) >= SMALLEST:
                live += event.nbytes()
                peak = max(peak, live)
        found.append((live, peak))
    return found


def traced(make: Make, make_optimizer: Optimizer) -> list[tuple[int, int]]:
    """The same, of a run that is recorded."""
    found = []

    def program(recorder: Recorder) -> None:
        run = stages(make, make_optimizer, "cuda")
        next(run)
        recorder.start_iteration()
        for _ in STAGES:
            before = recorder.peak_bytes = recorder.live_bytes
            next(run)
            found.append((recorder.live_bytes - before, recorder.peak_bytes - before))

    record(program)
    return found


def assert_alike(make: Make, make_optimizer: Optimizer) -> None:
    torch.optim.SGD([torch.zeros(1)], lr=1.0).step()  # what torch makes once in a process
    expected, seen = real(make, make_optimizer), traced(make, make_optimizer)
    for stage, there, here in zip(STAGES, expected, seen, strict=True):
        assert here == pytest.approx(there, abs=SMALLEST), stage


@pytest.mark.parametrize("model", MODELS)
def test_memory_rises_and_falls_as_in_a_real_run_of(model: str) -> None:
    assert_alike(MODELS[model], OPTIMIZERS["Adam, foreach"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_memory_rises_and_falls_as_in_a_real_run_with(optimizer: str) -> None:
    assert_alike(mlp, OPTIMIZERS[optimizer])


def test_a_convolutional_network_lives_as_long_as_in_a_real_run() -> None:
    def make() -> nn.Module:
        layers: list[nn.Module] = []
        for channels in (3, 8, 16):
            layers += [nn.Conv2d(channels, 2 * channels + 2, 3, padding=1), nn.BatchNorm2d(2 * channels + 2), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        return nn.Sequential(*layers[:8], nn.Flatten(), nn.Linear(18 * 64, 10))

    def run(device: str, live: Callable[[], int]) -> list[int]:
        model = make().to(device)
        optimizer = optim.Adam(model.parameters(), foreach=True)
        x = torch.rand(4, 3, 32, 32).to(device)
        start, seen = live(), []
        for _ in range(2):
            loss = model(x).sum()
            seen.append(live() - start)
            loss.backward()
            del loss
            seen.append(live() - start)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(live() - start)
        return seen

    def real() -> list[int]:
        with LiveBytes(torch.device("cpu")) as tracker:
            return run("cpu", lambda: tracker.live_bytes)

    here: list[int] = []
    record(lambda recorder: here.extend(run("cuda", lambda: recorder.live_bytes)))

    def shifted(seen: list[int]) -> list[int]:  # the tracker sees weights and inputs only when they are first used
        return [value - seen[2] for value in seen[2:]]

    assert shifted(here) == pytest.approx(shifted(real()), abs=4 * 12 + SMALLEST)
