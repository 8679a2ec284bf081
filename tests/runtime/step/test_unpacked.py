"""Batches that are objects: their tensors are inputs of the step, and what else they hold are constants of its plan."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import OverspillError, UnsupportedError
from overspill.runtime.reachable import same_bits


@dataclass
class Images:
    images: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    images: Tensor


class Attributes(dict[str, Any]):
    """A dictionary whose items are its attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


class Ordered(OrderedDict[str, Any]):
    """A dictionary that has an order."""


class Listed(list[Any]):
    """A list of a class of its own."""


class Batch:
    """An object of one's own, which knows another one that knows it."""

    def __init__(self, images: Tensor, **more: Any) -> None:
        self.inner = SimpleNamespace(list=[images], outer=self)
        vars(self).update(more)

    @property
    def images(self) -> Tensor:
        found: Tensor = self.inner.list[0]
        return found


class Opaque:
    """What has no value that could be compared, and nothing in it that could be seen."""

    __slots__ = ()

    def five(self) -> int:
        return 5


BATCHES: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "dataclass": (Images, lambda b: b.images),
    "frozen dataclass with slots": (Slotted, lambda b: b.images),
    "objects that know each other": (Batch, lambda b: b.images),
    "a part that nobody reads": (lambda x: Batch(x, part=Opaque()), lambda b: b.images),
    "mapping": (lambda x: UserDict(images=x), lambda b: b["images"]),
    "dictionary with attributes": (lambda x: Attributes(images=x), lambda b: b.images),
    "ordered dictionary": (lambda x: Ordered(images=x), lambda b: b["images"]),
    "list": (lambda x: Listed([x]), lambda b: b[0]),
}


class Trained:
    """A small model that reconstructs images, and the loss of a plain step on them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(400, 32), nn.ReLU(), nn.Linear(32, 400))

    def stepped(self, loss: Callable[..., Tensor], **how: Any) -> Any:
        model = copy.deepcopy(self.model)
        return overspill.train_step(
            model, loss, torch.optim.SGD(model.parameters(), 0.1), budget=0.9, store="host", **how
        )

    def losses(self, batches: list[Tensor]) -> list[Tensor]:
        model, found = self.model, []
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for images in batches:
            found.append(F.mse_loss(model(images), images))
            optimizer.zero_grad()
            found[-1].backward()
            optimizer.step()
        return [loss.detach() for loss in found]


def with_black_margins(count: int = 3) -> list[Tensor]:
    """Images that are spelled alike: their corners are black, and the rest is left out."""
    return [F.pad(torch.rand(8, 380), (10, 10)) for _ in range(count)]


@pytest.mark.parametrize("kind", BATCHES)
def test_a_batch_that_is_an_object_has_its_tensors_in_each_step(kind: str) -> None:
    make, images_of = BATCHES[kind]
    trained = Trained()
    step = trained.stepped(lambda model, batch: F.mse_loss(model(images_of(batch)), images_of(batch)))
    batches = with_black_margins()
    given = [make(images) for images in batches]
    found = [step(batch) for batch in given]
    assert len(step.plans) == 1
    assert all(map(same_bits, found, trained.losses(batches)))
    assert all(images_of(batch) is images for batch, images in zip(given, batches, strict=True))


@pytest.mark.long
def test_a_batch_that_is_an_object_is_split_into_micro_batches() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch.images), batch.images)

    found = []
    for make in (lambda x: x, Batch):
        step = Trained().stepped(loss if make is Batch else lambda model, x: F.mse_loss(model(x), x), accumulate=2)
        torch.manual_seed(1)
        found.append([step(make(images)) for images in with_black_margins()])
    assert all(map(same_bits, *found))


@pytest.mark.short("<lambda>0")
@pytest.mark.parametrize("make", [lambda array: array, lambda array: Batch(torch.zeros(()), array=array).array])
def test_an_array_and_numbers_in_an_object_are_constants_of_a_plan(make: Callable[[Any], Any]) -> None:
    def loss(model: nn.Module, x: Tensor, shift: Any, of: Any) -> Tensor:
        return model(x + torch.from_numpy(shift)).mean() * of.factor

    model = Trained()
    step = model.stepped(loss)
    x, shifts = torch.rand(8, 400), [np.zeros((8, 400), np.float32) for _ in range(2)]
    shifts[1][4, 200] = 100.0  # in the middle, which is not spelled
    losses = [step(x, make(shift), SimpleNamespace(factor=1.0)) for shift in (*shifts, shifts[0].copy())]
    assert len(step.plans) == 2
    assert losses[0] != losses[1] != losses[2]
    step(x, make(shifts[0]), SimpleNamespace(factor=2.0))
    assert len(step.plans) == 3


REFUSED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Any]]] = {
    "reads what has no value": (lambda x: Batch(x, part=Opaque()), lambda b: b.part.five()),
    "changes the batch": (Images, lambda b: setattr(b, "images", b.images * 2)),
    "an iterator": (lambda x: iter([x]), lambda _: None),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_planned_step_would_do_once_with_its_batch_is_refused(case: str) -> None:
    make, use = REFUSED[case]

    def loss(model: nn.Module, x: Tensor, batch: Any) -> Tensor:
        use(batch)
        return model(x).mean()

    (images,) = with_black_margins(1)
    batch = make(images)
    step = Trained().stepped(loss)
    with pytest.raises(OverspillError) as refusal:
        step(images, batch)
    assert isinstance(refusal.value, UnsupportedError)
    assert "\n" not in str(refusal.value)
    if isinstance(batch, Images):
        assert batch.images is images
