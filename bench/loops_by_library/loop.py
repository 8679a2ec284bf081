"""What a training loop is, the registry of all, and the one line that makes it train within a budget.

A loop is a function, written as its user would write it, that builds its model, trains, and returns what it `Trained`.
Its one argument is a `Line`, by which alone the runs of a loop differ.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch
from ground_truth.beside import add_directory
from torch import nn
from torch.optim import Optimizer

import overspill
import overspill.callbacks
from overspill.runtime.compiled.session import Session

M = TypeVar("M", bound=nn.Module)
Figures = Sequence[Any]
"""What a loop logs of a step: its loss, the norm of its gradients."""
INDUCTOR = "inductor"
LIBRARIES = "OVERSPILL_LOOPS"
"""The environment variable that names the folder of `make loops-libraries`, if that is another."""


class Line:
    """The line that a user adds to the loop; without a budget, nothing in its place.

    With Inductor's kernels the line without a budget is stock torch.compile, and partition=1 has its bits.
    """

    def __init__(
        self, budget: str | int | None, at_line: Callable[[], None] = lambda: None, backend: str = "eager"
    ) -> None:
        self.budget = budget
        self._options: dict[str, Any] = {"backend": backend}
        if backend == INDUCTOR:
            self._options["partition"] = 1.0
        self._holders: list[Any] = []
        """What has a session, once training has begun."""
        self._at_line = at_line
        """Called where the line stands: the model is there, and training has not begun."""

    @property
    def sessions(self) -> list[Session]:
        """The sessions that there are so far."""
        found = (getattr(holder, "session", holder) for holder in self._holders)
        return [session for session in found if session is not None]

    def callbacks(self, kind: str) -> list[Any]:
        """Return the callbacks to give a trainer: `[overspill.callbacks.Budget(…)]`, or another of the kind."""
        self._at_line()
        if self.budget is None:
            return [_stock(kind)] if self._is_inductor else []
        self._holders.append(getattr(overspill.callbacks, kind)(self.budget, **self._options))
        return self._holders[-1:]

    def forward(self, *models: nn.Module) -> None:
        """Put `model.forward = overspill.compile(model.forward, budget=…)`; several models share the budget."""
        self._at_line()
        if self.budget is None:
            for model in models if self._is_inductor else ():
                model.forward = torch.compile(model.forward, dynamic=False)
            return
        if len(models) == 1:
            models[0].forward = overspill.compile(models[0].forward, budget=self.budget, **self._options)
        else:
            session = overspill.Session(budget=self.budget, **self._options)
            for model in models:
                model.forward = overspill.compile(model.forward, session=session)
        self._holders.append(models[0].forward.overspill)

    def module(self, model: M) -> M:
        """Put `model = overspill.compile(model, budget=…)`."""
        self._at_line()
        if self.budget is None:
            return torch.compile(model, dynamic=False) if self._is_inductor else model
        compiled = overspill.compile(model, budget=self.budget, **self._options)
        self._holders.append(compiled.overspill)
        return compiled

    @property
    def _is_inductor(self) -> bool:
        return self._options["backend"] == INDUCTOR


def _stock(kind: str) -> Any:
    """Return a trainer's callback that compiles the model by stock torch.compile where the line's would."""
    if kind != "Budget":
        raise NotImplementedError(f"{kind} has no stock torch.compile to compare with")
    from transformers import TrainerCallback

    class Stock(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any = None, **__: Any) -> None:
            model.forward = torch.compile(model.forward, dynamic=False)

    return Stock()


@dataclass(frozen=True)
class Trained:
    """What a loop leaves, to be compared."""

    figures: Figures
    models: Sequence[nn.Module]
    optimizers: Sequence[Optimizer]
    folder: TemporaryDirectory[str] | None = None
    """Where it wrote its checkpoints."""
    others: Sequence[nn.Module] = ()
    """Models that the line does not stand at; the budget does not count their weights."""
    ends: bool = False
    """Whether the trainer itself reads all weights behind the last step; what follows that is not measured."""


Trains = Callable[[Line], Trained]


@dataclass(frozen=True)
class Loop:
    """A loop, the file that it is in, what it is in a few words, and the libraries that it needs besides torch."""

    name: str
    library: str
    about: str
    trains: Trains
    needs: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        """The libraries that are not there."""
        add_directory(LIBRARIES, first=False)
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def load(self) -> None:
        """Import the libraries."""
        for name in self.needs:
            importlib.import_module(name)


LOOPS: dict[str, Loop] = {}


def loop(about: str, *, needs: tuple[str, ...] = (), name: str = "") -> Callable[[Trains], Trains]:
    """Registers a loop under `name`, by default that of its function."""

    def register(trains: Trains) -> Trains:
        named = name or trains.__name__.replace("_", "-")
        if named in LOOPS:
            raise ValueError(f"two loops are named {named}")
        LOOPS[named] = Loop(named, trains.__module__.rpartition(".")[2], about, trains, needs)
        return trains

    return register
