"""How a job is trained: plainly, by stock torch.compile, and under a budget by either way in.

A job is a generator, written as its user would write it, that builds its model, trains, and yields each step's loss. Its
one argument is a `Way`, by which alone the runs of a job differ: `way.train(model, loss, batches)` is the usual loop,
`way.step(…)` one step of it for loops of one's own, `way.called(model)` a model that is called beside.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

import overspill
from overspill.plans.plan import Plan

from .peaks import measured

Loss = Callable[..., Tensor]
"""The loss, of the model and of the parts of a batch."""
Steps = Iterator[Any]


def adamw(model: nn.Module) -> Optimizer:
    """The optimizer of most jobs, of what trains."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-3)


class Way:
    """A training loop in plain PyTorch; what it trains is what is compared."""

    gives_gradients = True

    def __init__(self) -> None:
        self.models: list[nn.Module] = []
        self.optimizers: list[Optimizer] = []
        self.begun = 0.0
        """When the model was there, and training began."""

    def train(
        self, model: nn.Module, loss: Loss, batches: Iterable[Any], optimizer: Optimizer | None = None, **how: Any
    ) -> Steps:
        """The losses of a loop over batches: each a tuple of what the loss is given behind the model, or that itself."""
        step = self.step(model, loss, optimizer, **how)
        for batch in batches:
            yield step(*batch) if isinstance(batch, tuple) else step(batch)

    def step(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer | None = None,
        *,
        clip: float | None = None,
        accumulate: int = 1,
        has_gradients: bool = False,
    ) -> Callable[..., Tensor]:
        """What takes a step on a batch, in as many micro-batches as gradients are accumulated over, and returns the loss.

        Where the loss `has_gradients` in it, it is what is compiled, and not the model.
        """
        self.begun = self.begun or time.perf_counter()
        model.to(torch.get_default_device()).train()  # some make a parameter on the CPU always
        used = optimizer or adamw(model)
        self.models.append(model)
        self.optimizers.append(used)
        taken = self._step(model, loss, used, clip, accumulate, has_gradients=has_gradients)
        return taken if torch.get_default_device().type == "cpu" else _on_its_own_device(taken)

    def called(self, model: Any) -> Any:
        """`model`, to call in a loss or beside it."""
        return model

    def together(self, *models: nn.Module) -> None:
        """Say that these models share a budget."""

    def _step(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        clip: float | None,
        accumulate: int,
        *,
        has_gradients: bool,
    ) -> Callable[..., Tensor]:
        called = model if has_gradients else self.called(model)
        loss = self.called(loss) if has_gradients else self._of_loss(loss)

        def step(*batch: Any) -> Tensor:
            optimizer.zero_grad()
            losses = []
            for part in _micro_batches(batch, accumulate):
                value = loss(called, *part)
                (value / accumulate if accumulate > 1 else value).backward()
                losses.append(value.detach())
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            return torch.stack(losses).mean() if accumulate > 1 else losses[0]

        return step

    def _of_loss(self, loss: Loss) -> Loss:
        return loss

    @property
    def plans(self) -> list[Plan]:
        """The plans that were made."""
        return []

    @property
    def partitions(self) -> list[float]:
        """What was chosen of Inductor's partitions, by graph."""
        return []

    @property
    def over_bytes(self) -> int:
        """By how much the measured peak of a step is over the budget; 0 where none was measured."""
        return 0

    def close(self) -> None:
        """Give the stores back."""


def _micro_batches(batch: tuple[Any, ...], count: int) -> Iterator[tuple[Any, ...]]:
    for index in range(count):
        yield tree_map_only(Tensor, lambda t, i=index: t.chunk(count)[i], batch) if count > 1 else batch


def _on_its_own_device(step: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The step without PyTorch's default device, on which the job has made its model and batches, as `.to(device)` does."""

    def taken(*batch: Any) -> Tensor:
        device = torch.get_default_device()
        torch.set_default_device(None)
        try:
            return step(*batch)
        finally:
            torch.set_default_device(device)

    return taken


class StockModel(Way):
    """The model by stock torch.compile."""

    def called(self, model: Any) -> Any:
        """`model`, compiled."""
        return torch.compile(model, dynamic=False)


class StockLoss(Way):
    """The loss function by stock torch.compile."""

    def called(self, model: Any) -> Any:
        """A loss function compiled, a model as it is."""
        return model if isinstance(model, nn.Module) else torch.compile(model, dynamic=False)

    def _of_loss(self, loss: Loss) -> Loss:
        return torch.compile(loss, dynamic=False)


class Managed(Way):
    """Within a budget, by what `_held` says: sessions or steps, which have plans."""

    def __init__(self, budget: float, backend: str) -> None:
        super().__init__()
        self._asked: dict[str, Any] = {"budget": budget, "backend": backend}
        self._session: overspill.Session | None = None
        self._measures = backend == "eager" and torch.get_default_device().type == "cpu"
        self.peaks: list[tuple[int, int]] = []

    def step(self, *args: Any, **how: Any) -> Callable[..., Tensor]:
        """The same, with each step's peak measured, on the CPU and with eager kernels."""
        taken = super().step(*args, **how)
        if not self._measures:
            return taken
        own = self.models[-1:], self.optimizers[-1:]
        return measured(taken, lambda: (self.models, self.optimizers) if self._session else own, self.peaks)

    @property
    def _held(self) -> list[Any]:
        return []

    @property
    def plans(self) -> list[Plan]:
        """Those of all that is held."""
        return [plan for held in self._held for plan in held.plans]

    @property
    def partitions(self) -> list[float]:
        """Those of all plans."""
        return [partition for held in self._held for partition in held.partitions if partition is not None]

    @property
    def over_bytes(self) -> int:
        """As above."""
        allowed = max((plan.budget_bytes for plan in self.plans), default=0)
        return max((max(0, peak - max(allowed, before)) for before, peak in self.peaks), default=0)

    def close(self) -> None:
        """Close all that is held."""
        for held in self._held:
            held.close()


class Compiled(Managed):
    """By `overspill.compile`."""

    def __init__(self, budget: float, backend: str) -> None:
        super().__init__(budget, backend)
        self._compiled: dict[int, Any] = {}

    def together(self, *models: nn.Module) -> None:
        """One session for them."""
        self._session = overspill.Session(**self._asked)
        self._compiled |= {id(m): overspill.compile(m, session=self._session) for m in models}

    def called(self, model: Any) -> Any:
        """`model`, compiled."""
        if id(model) not in self._compiled:
            self._compiled[id(model)] = overspill.compile(model, **self._asked)
        return self._compiled[id(model)]

    @property
    def _held(self) -> list[Any]:
        return list({id(c.overspill): c.overspill for c in self._compiled.values()}.values())


class Stepped(Managed):
    """By `overspill.train_step`."""

    gives_gradients = False

    def __init__(self, budget: float, backend: str) -> None:
        super().__init__(budget, backend)
        self._steps: list[Any] = []

    def together(self, *models: nn.Module) -> None:
        """One session for their steps."""
        del models
        self._session = overspill.Session(**self._asked)
        self._asked = {"session": self._session}

    def _step(
        self,
        model: nn.Module,
        loss: Loss,
        optimizer: Optimizer,
        clip: float | None,
        accumulate: int,
        *,
        has_gradients: bool,
    ) -> Callable[..., Tensor]:
        del has_gradients
        step = overspill.train_step(model, loss, optimizer, clip_norm=clip, accumulate=accumulate, **self._asked)
        self._steps.append(step)
        return step

    @property
    def _held(self) -> list[Any]:
        return self._steps

    def close(self) -> None:
        """Close the steps, and their session."""
        super().close()
        if self._session is not None:
            self._session.close()


WAYS: dict[str, tuple[type[Way], Callable[[float | int], Way]]] = {
    "compile": (Way, functools.partial(Compiled, backend="eager")),
    "train_step": (Way, functools.partial(Stepped, backend="eager")),
    "compile-inductor": (StockModel, functools.partial(Compiled, backend="inductor")),
    "train_step-inductor": (StockLoss, functools.partial(Stepped, backend="inductor")),
}
"""By name: what a way in is compared with, and the way in itself within a budget."""
