"""What a job is, and the registry of all: `@job("what it is", needs=[…])` on a generator that trains (`ways.py`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

from ground_truth.beside import add_directory
from ground_truth.torchvision_models import without_fake_operators

from .ways import Steps

Trains = Callable[..., Steps]


@dataclass(frozen=True)
class Job:
    """A job, the file that it is in, what it is in a few words, and the libraries that it needs besides torch.

    Where `deep` is given, `trains` takes a number of layers, and that is a number as in real models.
    """

    name: str
    field: str
    about: str
    trains: Trains
    needs: tuple[str, ...]
    deep: int

    @property
    def missing(self) -> list[str]:
        """The libraries that are not there."""
        add_directory("OVERSPILL_JOBS", first=False)
        return [name for name in self.needs if importlib.util.find_spec(name) is None]

    def load(self) -> None:
        """Import the libraries, and torchvision, which some import where it is there."""
        with without_fake_operators():
            for name in ("torchvision", *self.needs):
                if importlib.util.find_spec(name):
                    importlib.import_module(name)


JOBS: dict[str, Job] = {}


def job(about: str, *, needs: tuple[str, ...] = (), deep: int = 0) -> Callable[[Trains], Trains]:
    """Registers a job under the name of its function."""

    def register(trains: Trains) -> Trains:
        name = trains.__name__.replace("_", "-")
        if name in JOBS:
            raise ValueError(f"two jobs are named {name}")
        JOBS[name] = Job(name, trains.__module__.rpartition(".")[2], about, trains, needs, deep)
        return trains

    return register
