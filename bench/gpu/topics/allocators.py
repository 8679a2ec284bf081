"""Topic 13: any job on Overspill's allocators, beside PyTorch's; what they reserve, what a step costs, and graphs on them."""

from __future__ import annotations

import torch
from torch import Tensor

import overspill
from gpu.experiment import Figures, Setting

from .jobs import JOBS, build, synchronize, timed
from .ways import eager

PYTORCH = "pytorch"
REPLAYS = 5


def step_time(setting: Setting, job: str, allocator: str) -> Figures:
    """Step times and peaks of plain training, and of Overspill's allocators what they did."""
    used = overspill.allocator(allocator) if allocator != PYTORCH else None  # before CUDA is in use
    found = timed(setting, eager(build(setting, JOBS[job])).step)
    if setting.is_cuda:
        found["requested_peak_bytes"] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    return found | ({} if used is None else {"counts": used.figures().counts._asdict()})


def graphs(setting: Setting, job: str, allocator: str) -> Figures:
    """The loss of forward as it is, and of each replay of a graph of it, while other blocks come and go."""
    overspill.allocator(allocator)
    built = build(setting, JOBS[job])
    step = built.to_device()
    side = torch.cuda.Stream()
    losses: list[float] = []

    def forward() -> Tensor:
        torch.manual_seed(1)
        with torch.no_grad():
            loss: Tensor = step(*built.batch)
        return loss

    with torch.cuda.stream(side):
        plain = [forward().item() for _ in range(2)]
    synchronize(setting)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=side):
        loss = step(*built.batch)
    for turn in range(REPLAYS):
        other = torch.full((1 << 20, 1 + turn), float("nan"), device=setting.device)
        graph.replay()
        losses.append(loss.item())
        del other
    return {"losses": plain, "replayed_losses": losses}
