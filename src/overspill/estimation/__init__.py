"""Estimates of a job's device memory.

Before it runs and without the device. What is handed on here is imported when it is first used: the command line reads
a job without paying for numpy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .estimate import Estimate as Estimate
    from .scaling import Scaling as Scaling

_LAZY = {"Estimate": ".estimate", "Scaling": ".scaling"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
