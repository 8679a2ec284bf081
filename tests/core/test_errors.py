"""Memory that runs out is told from other errors, whoever says it."""

from __future__ import annotations

import importlib
import pickle

import pytest
import torch

from overspill import errors
from overspill.core.errors import (
    InfeasibleBudgetError,
    OutOfMemoryError,
    OverspillError,
    RequestError,
    is_out_of_memory,
)

SAID = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes",
    "could not create a primitive",  # of a convolution in an address space that ends
    "std::bad_alloc",
    "can't start new thread",
)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), *(RuntimeError(text) for text in SAID)]
)
def test_what_is_said_of_memory_is_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["could not create a primitive descriptor for a convolution", "shapes differ"])
def test_other_errors_are_not_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize(
    "error",
    [
        InfeasibleBudgetError("too small", budget_bytes=1, floor_bytes=2, cause="an op").with_help("; else"),
        OutOfMemoryError("full", requested_bytes=1, reserved_bytes=2, capacity_bytes=None),
        RequestError("wrong"),
    ],
)
def test_an_error_passes_from_one_process_to_another(error: OverspillError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


def test_a_loop_that_halves_its_batch_catches_a_budget_that_is_too_small() -> None:
    importlib.import_module("overspill.runtime.infeasible")
    error = InfeasibleBudgetError("too small", budget_bytes=1, floor_bytes=2, cause="an op")
    assert isinstance(error, torch.OutOfMemoryError)
    assert not is_out_of_memory(error)


def test_each_error_ends_in_error_and_is_one_that_python_has() -> None:
    made = [vars(errors)[name] for name in errors.__all__]
    assert all(kind.__name__.endswith("Error") for kind in made)
    without = {kind.__name__ for kind in made if not issubclass(kind, (ValueError, RuntimeError, OSError))}
    assert without == {"OverspillError", "PolicyError", "UnsupportedError"}


def test_what_dynamo_adds_to_an_error_does_not_pass_with_it() -> None:
    error = InfeasibleBudgetError("too small", budget_bytes=1, floor_bytes=2, cause="an op")
    error.real_stack = object()  # type: ignore[attr-defined]
    plain = InfeasibleBudgetError("too small", budget_bytes=1, floor_bytes=2, cause="an op")
    assert vars(pickle.loads(pickle.dumps(error))) == vars(plain)
