"""The random generators that users' code samples from on the host: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def python_randomness() -> tuple[Any, Any]:
    """Return the state of Python's generator, and of the one that `np.random.rand()` samples from."""
    return random.getstate(), np.random.get_state()  # noqa: NPY002 - users do draw from it


def set_python_randomness(state: tuple[Any, Any]) -> None:
    """Make both generators go on from `state`."""
    random.setstate(state[0])
    np.random.set_state(state[1])  # noqa: NPY002


def randomness() -> Any:
    """Return the state of all generators: torch's on the host and on the GPUs in use, Python's and NumPy's.

    It has no tensors, which would count in a budget on the CPU.
    """
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *on_gpus)], python_randomness()


def set_randomness(state: Any) -> None:
    """Make all generators go on from `state`."""
    of_torch, of_python = state
    on_host, *on_gpus = (torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in of_torch)
    torch.set_rng_state(on_host)
    for number, on_gpu in enumerate(on_gpus):
        torch.cuda.set_rng_state(on_gpu, number)
    set_python_randomness(of_python)


@contextmanager
def drawing_from(seed: int | None) -> Iterator[None]:
    """Seed all generators with `seed` inside the block (None: leave them), and restore their states afterwards."""
    kept = python_randomness()
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)  # noqa: NPY002
        try:
            yield
        finally:
            set_python_randomness(kept)
