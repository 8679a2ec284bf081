"""accelerate within a budget, with accumulated gradients: one line before `prepare`; the loop stays as it is.

Needs `pip install -c constraints.txt -e ".[recipes]"`; docs/recipes.md says what to watch out for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from measured import Run, Samples, measured, report
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

import overspill

BATCH = 256
BUDGET = 3_600_000
AHEAD = BATCH * (128 * 4 + 8)
"""Bytes of a batch: accelerate's loader has the next one ready, beside the model's budget."""
STEPS = 6  # micro-batches; a checkpoint is written after 4


def network() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(6)]
    return nn.Sequential(*blocks, nn.Linear(128, 10))


def train(folder: Path, budget: int | None, *, resume: bool = False) -> Run:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    compiled = None
    if budget is not None:
        compiled = model.forward = overspill.compile(model.forward, budget=budget, store="host")  # the one line
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(Samples(BATCH * STEPS - 100), BATCH)  # the last batch is smaller
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resume:
        accelerator.load_state(str(folder / "state"))
        loader = accelerator.skip_first_batches(loader, 4)

    losses = []
    with measured(compiled) as live:
        for number, (inputs, targets) in enumerate(loader, 5 if resume else 1):
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if number == 4 and not resume:
                accelerator.save_state(str(folder / "state"))
    model = accelerator.unwrap_model(model)
    accelerator.save_model(model, str(folder / "model"))
    return Run(losses, dict(model.state_dict()), live.peak_bytes)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, budgeted = Path(folder, "plain"), Path(folder, "budgeted")
        expected = train(plain, None)
        run = train(budgeted, BUDGET - AHEAD)
        again = train(budgeted, BUDGET - AHEAD, resume=True)
        again.losses = run.losses[:4] + again.losses
        saved = network()  # a plain model, from a budgeted one's file
        saved.load_state_dict(load_file(budgeted / "model" / "model.safetensors"))
    report(BUDGET, expected, run, again, dict(saved.state_dict()))


if __name__ == "__main__":
    main()
