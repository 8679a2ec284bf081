"""Memory that runs out is told from other errors, whoever says it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from overspill.core.errors import is_out_of_memory

CONVOLUTIONS = """
import resource, sys, torch
torch.set_num_threads(1)
layers = [(torch.nn.Conv2d(c, c, 3, padding=1), torch.ones(1, c, size, size, requires_grad=True))
          for c in (64, 128, 192, 256, 96, 48) for size in (7, 9, 14, 28, 33)]
torch.nn.Conv2d(16, 16, 3)(torch.ones(2, 16, 8, 8))
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use + int(sys.argv[1]),) * 2)
try:
    for layer, x in layers:
        layer(x).sum().backward()
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("room_bytes", [0, 4_000_000, 8_000_000])
def test_whatever_a_step_says_whose_address_space_ends_is_known(room_bytes: int) -> None:
    """Less room than the gradients take. Where it ends in a kernel, oneDNN says so in its own words."""
    command = [sys.executable, "-c", CONVOLUTIONS, str(room_bytes)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert is_out_of_memory(RuntimeError(said)), said


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory")])
def test_the_exceptions_made_for_it_are_known(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["could not create a primitive descriptor for a convolution", "shapes differ"])
def test_other_errors_are_not_of_memory(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))
