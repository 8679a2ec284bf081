"""Overspill: the memory system for deep-learning training.

    overspill.estimate(build, inputs, loss, "adamw", device="rtx4090").fits()

predicts before the run, and without the GPU, whether its memory is enough.

    overspill.plan(build, inputs, loss, "adamw", device="rtx4090", budget="8GiB").slowdown

predicts the cost of training in less memory.

    model = overspill.compile(model, budget="8GiB")

trains within 8 GiB of device memory, with the same numbers to the last bit.

    with overspill.record(model) as recording: ...

records some steps of that. `import overspill` is cheap: torch is imported when something that needs it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import errors
from .core.reportable import Reportable as _Reportable

if TYPE_CHECKING:
    from .api import advise, compare, pack, plan, sweep
    from .callbacks.recording import record
    from .devices import load_device
    from .estimation.api import estimate
    from .runtime.allocator import allocator, step
    from .runtime.compiled.compile import compile  # noqa: A004
    from .runtime.compiled.session import Session
    from .runtime.graph_plan import plan_graph
    from .runtime.step.train_step import train_step

__version__ = "0.1.0"
__all__ = [
    "Session",
    "advise",
    "allocator",
    "compare",
    "compile",
    "errors",
    "estimate",
    "load_device",
    "pack",
    "plan",
    "plan_graph",
    "record",
    "step",
    "sweep",
    "train_step",
]

_LAZY = {
    "Session": "overspill.runtime.compiled.session",
    "advise": "overspill.api",
    "allocator": "overspill.runtime.allocator",
    "compare": "overspill.api",
    "compile": "overspill.runtime.compiled.compile",
    "estimate": "overspill.estimation.api",
    "load_device": "overspill.devices",
    "pack": "overspill.api",
    "plan": "overspill.api",
    "plan_graph": "overspill.runtime.graph_plan",
    "record": "overspill.callbacks.recording",
    "step": "overspill.runtime.allocator",
    "sweep": "overspill.api",
    "train_step": "overspill.runtime.step.train_step",
}
_Reportable._pages = lambda: import_module("overspill.report.results")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "callbacks":  # which imports nothing of a trainer before it is used
        return import_module("overspill.callbacks")
    instead = f"; it is overspill.errors.{name}" if name in errors.__all__ else ""
    raise AttributeError(f"module 'overspill' has no attribute {name!r}{instead}")
