"""Figures per step of a compiled model or a train step, averaged over the steps since they were last taken."""

from __future__ import annotations

import time
from typing import Any

from torch import nn

from overspill.core.errors import RequestError
from overspill.runtime import accelerator
from overspill.runtime.compiled.session import Session
from overspill.runtime.step.train_step import TrainStep

PREFIX = "overspill/"


class StepFigures:
    """Memory, transfer and time figures of a model in training.

    `model` is a compiled model or method, a module that has one inside, a Session, or a train step. An object made
    before training finds the compiled model at the first step at the latest.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._found: Session | TrainStep | None = None
        self._moved = (0, 0, 0.0)
        self._since = time.perf_counter()
        self._steps = 0

    def step(self) -> None:
        """Count a step."""
        self._steps += 1

    def take(self) -> dict[str, float]:
        """Return the figures by name, averaged over the steps since last time.

        - `planned_peak_bytes`: of the plans in force.
        - `steps_over`: how many steps so far did what their plans did not know.
        - `offloaded_bytes`, `prefetched_bytes`, `step_seconds`: of a step.
        - `wait_seconds`, on the CPU: how long compute waited for transfers.
        - `measured_peak_bytes`, on CUDA, where compute waits on the device: PyTorch's peak of allocated bytes since its
          last reset.

        Raises RequestError if Overspill takes no part in the model.
        """
        if self._found is None:
            self._found = figures_source(self._model)
        # Bytes and waits since the figures were last taken, a step.
        source, steps, now = self._found, max(1, self._steps), time.perf_counter()
        engine = source.engine
        moved = (
            (0, 0, 0.0) if engine is None else (engine.offloaded_bytes, engine.prefetched_bytes, engine.waited_seconds)
        )
        offloaded, prefetched, waited = (max(0, new - old) / steps for new, old in zip(moved, self._moved, strict=True))
        found: dict[str, float] = {
            "planned_peak_bytes": source.peak_bytes,
            "offloaded_bytes": offloaded,
            "prefetched_bytes": prefetched,
            "step_seconds": (now - self._since) / steps,
            "steps_over": source.steps_over,
        }
        # The CPU has a clock for waits, CUDA a peak of allocated bytes.
        if source.device.type == "cpu":
            found["wait_seconds"] = waited
        else:
            found["measured_peak_bytes"] = accelerator.peak_bytes(source.device)[0]
        self._moved, self._since, self._steps = moved, now, 0
        return {PREFIX + name: value for name, value in found.items()}


def figures_of(model: Any) -> dict[str, float]:
    """Return the figures of all that `model` did so far, as of one step. Raises RequestError.

    To take figures more than once, make a StepFigures.
    """
    return StepFigures(model).take()


def figures_source(model: Any) -> Session | TrainStep:
    """Return the session or train step that trains `model`. Raises RequestError if Overspill takes no part in it."""
    if isinstance(model, (Session, TrainStep)):
        return model
    held = [model, getattr(model, "forward", None)]
    if isinstance(model, nn.Module):
        held += [part for module in model.modules() for part in (module, module.__dict__.get("forward"))]
    found = {id(s): s for part in held if isinstance(s := getattr(part, "overspill", None), Session)}
    if len(found) == 1:
        return next(iter(found.values()))
    name = type(model).__name__
    if found:
        raise RequestError(f"{name} is compiled in {len(found)} sessions; pass the one to log, as model.overspill")
    raise RequestError(
        f"{name} has nothing of Overspill: pass what overspill.compile or overspill.train_step returned, or a module "
        "with it inside"
    )
