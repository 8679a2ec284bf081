"""The errors that Overspill raises on purpose, each with one clear line and the exit code of the command line."""

from .core.errors import (
    InfeasibleBudgetError,
    InvalidLayoutError,
    InvalidScheduleError,
    OutOfMemoryError,
    OverspillError,
    PolicyError,
    RequestError,
    StoreError,
    UnplannedError,
    UnsupportedError,
)

__all__ = [
    "InfeasibleBudgetError",
    "InvalidLayoutError",
    "InvalidScheduleError",
    "OutOfMemoryError",
    "OverspillError",
    "PolicyError",
    "RequestError",
    "StoreError",
    "UnplannedError",
    "UnsupportedError",
]
