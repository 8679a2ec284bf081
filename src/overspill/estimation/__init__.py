"""Estimates of a job's device memory, before it runs and without the device.

Exported names are imported at first use, so that the command line reads a job without importing numpy.
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
