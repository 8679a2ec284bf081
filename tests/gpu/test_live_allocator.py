"""PyTorch's CUDA memory from the live allocator, in a process of its own: PyTorch takes an allocator once. Skipped without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture(scope="module")
def plain_losses() -> str:
    return losses("none")


def losses(pool: str) -> str:
    """What the campaign's training on `pool` prints."""
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    done = subprocess.run(
        [sys.executable, "-m", "gpu.topics.live", pool],
        cwd=BENCH, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("pool", ["best-fit", "two-ended", "virtual"])
def test_planned_training_on_the_gpu_has_the_same_losses(pool: str, plain_losses: str) -> None:
    assert losses(pool) == plain_losses
