"""DOOR HOW: train a model that is larger than its card, as JSON; it is in host memory, or `mapped` from a file.

The kernels of the stand-in do nothing, so only frozen weights keep their numbers.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stand_in
import torch
from tests.gpu_rehearsal.processes import tell
from torch import Tensor, nn

import overspill

WIDTH, LAYERS, STEPS = 1024, 24, 3


class Adapted(nn.Module):
    """Frozen layers with adapters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(8, WIDTH, bias=False) for _ in range(LAYERS))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.relu(base(x) + up(down(x))) * self.scale
        return x


def mapped(model: nn.Module) -> nn.Module:
    """Return the model again, with weights that are mapped from a file."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(model.state_dict(), path := Path(folder) / "model.pt")
        with torch.device("meta"):
            again = Adapted()
        again.load_state_dict(torch.load(path, mmap=True), assign=True)
    return again


def compiled(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Tensor], Any]:
    """Return the step of a loop around the compiled model, and its session."""
    called = overspill.compile(model, device="cuda")

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(called(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step, called.overspill


def main(door: str, how: str) -> None:
    """Train a few steps, read the weights, train again, and end."""
    model: nn.Module = Adapted()
    frozen = [p.detach().clone() for p in model.parameters() if not p.requires_grad]
    model = mapped(model) if how == "mapped" else model
    where = {p.data_ptr() for p in model.parameters()}
    found = {"model_bytes": sum(p.nbytes for p in model.parameters())}
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    if door == "compile":
        step, of = compiled(model, optimizer)
    else:
        step = of = overspill.train_step(model, nn.MSELoss(), optimizer, device="cuda")
    x = torch.randn(16, WIDTH, device="cuda")
    loss = step(x, x)
    found["first_bytes_out"] = stand_in.counts().bytes_out
    step(x, x)
    before = stand_in.counts()
    for _ in range(STEPS):
        step(x, x)
    since = stand_in.counts().since(before)
    found |= {"syncs": since.syncs, "mallocs": since.mallocs, "bytes_out": since.bytes_out, "bytes_in": since.bytes_in}

    def same() -> bool:
        with of.paused():
            now = [p.cpu() for p in model.parameters() if not p.requires_grad]
        return all(map(torch.equal, now, frozen))

    (plan,) = of.plans
    found |= {
        "loss_on": str(loss.device),
        "moved_bytes": sum(plan.graph.tensors[t].nbytes for t in plan.schedule.stored),
        "same_when_read": same(),
        "where_they_were": sum(p.data_ptr() in where for p in model.parameters()),
    }
    step(x, x)
    of.close()
    found |= {
        "same_at_the_end": same(),
        "at_the_end_on": sorted({str(tensor.device) for tensor in model.state_dict().values()}),
        "most_bytes": torch.cuda.max_memory_reserved(),
        "reserved_bytes": plan.reserved_bytes,
        "context_bytes": plan.device.context_bytes,
    }
    tell(found)


if __name__ == "__main__":
    main(*sys.argv[1:])
