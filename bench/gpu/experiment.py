"""What an experiment is, what it is told of where it runs, and the errors that are answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
"""What an experiment found: numbers in the unit of their name, strings, lists and dictionaries of these."""


@dataclass(frozen=True)
class Topic:
    """Experiments that belong together: the question that they answer, and what follows from the answer."""

    number: int
    title: str
    question: str
    decides: str


@dataclass(frozen=True)
class Experiment:
    """One measurement in a process of its own: `function` is `module:function`, called with a Setting and `arguments`.

    `seconds` is how long it should take on a GPU: a guess until one has been measured. It is stopped after
    `limit_seconds`. `needs` are those whose figures it reads, `environment` is what must be set before Python starts, and
    `on_cpu` says whether it means something without a GPU.
    """

    name: str
    topic: Topic
    function: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 10.0
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    on_cpu: bool = False

    @property
    def limit_seconds(self) -> float:
        """After so many seconds it is stopped."""
        return max(90.0, 4 * self.seconds)

    def run(self, setting: Setting) -> Figures:
        """Its figures. Raises what goes wrong in it."""
        module, _, name = self.function.partition(":")
        found: Figures = getattr(import_module(module), name)(setting, **self.arguments)
        return found


class Waiting(Exception):
    """An experiment whose figures are needed has none yet."""


@dataclass(frozen=True)
class Setting:
    """Where an experiment runs: on `cpu` or `cuda`, in small or not, and after which others.

    `memory_bytes` is what the device has, told here because who asks CUDA cannot give PyTorch another allocator any
    more; 0 where nobody knows. What is noted survives a crash or a stop of the experiment.
    """

    device: str
    small: bool = False
    memory_bytes: int = 0
    earlier: Mapping[str, Figures] = field(default_factory=dict)
    notes: Path | None = None
    noted: Figures = field(default_factory=dict)

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.startswith("cuda")

    def figures_of(self, name: str) -> Figures:
        """What an earlier experiment found. Raises Waiting."""
        if name not in self.earlier:
            raise Waiting(f"it needs the figures of {name}")
        return self.earlier[name]

    def note(self, **figures: Any) -> None:
        """Keep figures at once."""
        self.noted.update(figures)
        if self.notes is not None:
            write_atomically(self.notes, {"figures": self.noted})


def peak_of(figures: Figures, kind: str) -> int | None:
    """What a job had `allocated` or `reserved` at most, in the steps that were timed and before; None if nobody counted."""
    name = f"{kind}_peak_bytes"
    peaks = figures.get(name), figures.get("first_steps_peaks", {}).get(name)
    return max((int(peak) for peak in peaks if peak is not None), default=None)


def write_atomically(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON so that whoever reads finds the old or the new, and no half of either."""
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(content), encoding="utf-8")
    beside.replace(path)
