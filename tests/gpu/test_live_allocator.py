"""PyTorch's CUDA memory from the live allocator, in a process of its own: PyTorch takes an allocator once. Skipped without one."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TRAINING = """
import sys
import torch
from overspill.runtime.live.allocator import LiveAllocator
from overspill.runtime.live.planned_steps import PlannedSteps
from tests.runtime.live.live import FirstFit

pool = sys.argv[1]
allocator = LiveAllocator("cuda", pool, main_bytes=256 << 20, chunk_bytes=2 << 20) if pool != "none" else None
if allocator:
    allocator.serve_pytorch()
    steps = PlannedSteps(allocator, FirstFit())
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
model = torch.nn.Sequential(*(m for _ in range(4) for m in (torch.nn.Linear(1024, 1024), torch.nn.ReLU()))).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
side = torch.cuda.Stream()
for _ in range(8):
    if allocator:
        steps.begin_step()
    optimizer.zero_grad()
    x = torch.randn(1024, 1024, device="cuda")
    loss = model(x).square().mean()
    with torch.cuda.stream(side):
        side.wait_stream(torch.cuda.default_stream())
        copy = x.to("cpu", non_blocking=True)
        x.record_stream(side)
    del x
    loss.backward()
    optimizer.step()
    print(loss.item())
    del loss
if allocator:
    now = allocator.statistics()
    assert steps.plans and now.planned, now
    print(now, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def plain_losses() -> str:
    return losses("none")


def losses(pool: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, pool],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("pool", ["best-fit", "two-ended", "virtual"])
def test_planned_training_on_the_gpu_has_the_same_losses(pool: str, plain_losses: str) -> None:
    assert losses(pool) == plain_losses
