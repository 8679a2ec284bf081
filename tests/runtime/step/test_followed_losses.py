"""A loss, and what it reads of Python, is followed as it changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.step.plus import batch, made, step_of
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.runtime.reachable import same_bits

FACTOR = 1.0
"""A global that `by_global` reads."""


class Scales:
    """An object that the step makes for itself."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, y: Tensor) -> Tensor:
        return helper(y * self.by)


def losses(make_loss: Callable[[], Any], change: Callable[[Any], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of a step and of plain training, with a change to the loss function between."""
    found: list[list[Tensor]] = []
    for plain in (False, True):
        model, optimizer = made()
        loss = make_loss()
        step = step_of(model, optimizer, loss)
        x, y = batch()
        values = []
        for index in range(4):
            if index == 2:
                change(loss)
            if plain:
                optimizer.zero_grad()
                value = loss(model, x, y)
                value.backward()
                optimizer.step()
            else:
                value = step(x, y)
            values.append(value.detach())
        found.append(values)
    return found[0], found[1]


def with_closure() -> Any:
    weight, shift = 1.0, torch.zeros(3)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return weight * F.cross_entropy(model(x) + shift, y)

    def put(number: float, tensor: Tensor) -> None:
        nonlocal weight, shift
        weight, shift = number, tensor

    loss.put = put  # type: ignore[attr-defined]
    return loss


def by_global(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return helper(F.cross_entropy(model(x), y))


def helper(value: Tensor) -> Tensor:
    return FACTOR * value


def by_default(model: nn.Module, x: Tensor, y: Tensor, *, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=smoothing)


class Objective:
    """A loss that is an object with a method, and much besides that forward does not read."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.log: list[float] = []

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.scaled(F.cross_entropy(model(x), y))

    def scaled(self, value: Tensor) -> Tensor:
        return self.weight * value


def with_array() -> Any:
    numbers = np.ones(3, np.float32)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x) * torch.tensor(numbers), y)

    loss.numbers = numbers  # type: ignore[attr-defined]
    return loss


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number in a closure": (with_closure, lambda loss: loss.put(3.0, torch.zeros(3))),
    "a tensor in a closure": (with_closure, lambda loss: loss.put(1.0, torch.tensor([1.0, 0.0, -1.0]))),
    "a default": (lambda: functools.partial(by_default), lambda loss: loss.keywords.update(smoothing=0.3)),
    "an attribute of an object": (Objective, lambda loss: setattr(loss, "weight", 2.0)),
    "a method of an object": (lambda: Objective().__call__, lambda loss: setattr(loss.__self__, "weight", 2.0)),
    "an array in place": (with_array, lambda loss: loss.numbers.__setitem__(1, 5.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_loss_is_followed(name: str) -> None:
    found, expected = losses(*CHANGES[name])
    assert all(map(same_bits, found, expected))
    assert not same_bits(expected[1], expected[2])


def test_zero_and_minus_zero_are_not_the_same() -> None:
    model, optimizer = made(lambda model, y: y * math.copysign(2.0, model.sign))
    model.sign = 0.0
    step, (x, y) = step_of(model, optimizer), batch()
    step(x, y)
    model.sign = -0.0
    expected = F.cross_entropy(model(x), y).detach()
    assert same_bits(step(x, y), expected)


REPLACED: dict[str, tuple[Any, Any, str, Any, float]] = {
    "a global": (None, by_global, f"{__name__}.FACTOR", 0.0, 0.0),
    "a function": (None, by_global, f"{__name__}.helper", lambda value: value * 0, 0.0),
    "a function that an object of the step calls": (
        lambda _, y: Scales(1.0)(y), F.cross_entropy, f"{__name__}.helper", lambda value: value * 0, math.log(3),
    ),
    "a method": (None, F.cross_entropy, "tests.runtime.step.plus.Plus.forward", lambda self, x: self.linear(x) * 0, math.log(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, loss, what, by, expected = REPLACED[name]
    model, optimizer = made(change)
    step = step_of(model, optimizer, loss)
    assert step(*batch()).item() not in (0, pytest.approx(math.log(3)))
    monkeypatch.setattr(what, by)
    assert step(*batch()).item() == pytest.approx(expected)
