"""The errors that Overspill raises on purpose, each with one clear line and the exit code of the command line."""

from .core.errors import (
    InfeasibleBudget,
    InvalidLayout,
    InvalidSchedule,
    OutOfMemory,
    OverspillError,
    PolicyError,
    RequestError,
    StoreError,
    UnplannedError,
    UnsupportedError,
)

__all__ = [
    "InfeasibleBudget",
    "InvalidLayout",
    "InvalidSchedule",
    "OutOfMemory",
    "OverspillError",
    "PolicyError",
    "RequestError",
    "StoreError",
    "UnplannedError",
    "UnsupportedError",
]
