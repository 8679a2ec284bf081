"""Lightning within a budget: one line in the LightningModule; the Trainer evaluates, saves and resumes as ever.

Needs `pip install -c constraints.txt -e ".[recipes]"`; docs/recipes.md says what to watch out for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import lightning
import torch
import torch.nn.functional as F
from measured import Run, Samples, measured, report
from torch import Tensor, nn
from torch.utils.data import DataLoader

import overspill

BUDGET = "3MiB"


class Classifier(lightning.LightningModule):
    """A network of six blocks, trained by Lightning's automatic optimization."""

    def __init__(self, budget: str | None) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128)) for _ in range(6)]
        self.net = nn.Sequential(*blocks, nn.Linear(128, 10))
        self.compiled = None
        if budget is not None:
            self.compiled = self.net.forward = overspill.compile(self.net.forward, budget=budget, store="host")
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("validation loss", loss)
        self.losses.append(loss.item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(epochs: int, budget: str | None, save_to: Path, resume_from: Path | None = None) -> Run:
    torch.manual_seed(0)
    module = Classifier(budget)
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", num_sanity_val_steps=0 if resume_from else 2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with measured(module.compiled) as live:
        trainer.fit(
            module, DataLoader(Samples(1000), 256), DataLoader(Samples(300, seed=2), 256), ckpt_path=resume_from
        )
    trainer.save_checkpoint(save_to)
    return Run(module.losses, dict(module.state_dict()), live.peak_bytes)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.ckpt"), Path(folder, "second.ckpt")
        expected = train(2, None, second)
        begun = train(1, BUDGET, first)
        run = train(2, BUDGET, second)
        saved = Classifier(None)  # a plain module, from a budgeted one's file
        saved.load_state_dict(torch.load(second, weights_only=False)["state_dict"])
        again = train(2, BUDGET, second, resume_from=first)
    again.losses = begun.losses + again.losses
    report(BUDGET, expected, run, again, dict(saved.state_dict()))


if __name__ == "__main__":
    main()
