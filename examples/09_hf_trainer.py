"""Hugging Face Trainer within a budget: one line before the Trainer is made; it evaluates, saves and resumes as ever.

Needs `pip install -c constraints.txt -e ".[recipes]"`; docs/recipes.md says what to watch out for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from measured import Run, measured, report
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import overspill

BUDGET = "12MiB"


def tokens(count: int, seed: int) -> list[dict[str, Tensor]]:
    ids = torch.randint(0, 256, (count, 64), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


def train(folder: Path, budget: str | None, resume_from: Path | None = None) -> Run:
    set_seed(0 if resume_from is None else 1)  # other weights at first: those of the checkpoint have to come
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
    model.loss_type = "ForCausalLM"  # unset for this class: a warning in forward would then split its graph in two
    compiled = None
    if budget is not None:
        compiled = model.forward = overspill.compile(model.forward, budget=budget, store="host")  # the one line

    arguments = TrainingArguments(
        str(folder), num_train_epochs=1, per_device_train_batch_size=8, per_device_eval_batch_size=8, logging_steps=1,
        eval_strategy="steps", eval_steps=3, save_steps=3, use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens(44, 1), eval_dataset=tokens(12, 2))
    with measured(compiled) as live:
        trainer.train(resume_from_checkpoint=None if resume_from is None else str(resume_from))
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return Run(losses, dict(model.state_dict()), live.peak_bytes)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain, budgeted, resumed = (Path(folder, name) for name in ("plain", "budgeted", "resumed"))
        expected = train(plain, None)
        run = train(budgeted, BUDGET)
        again = train(resumed, BUDGET, resume_from=budgeted / "checkpoint-3")
        saved = GPT2LMHeadModel.from_pretrained(budgeted / "checkpoint-6")  # a plain model, from a budgeted one's file
    report(BUDGET, expected, run, again, dict(saved.state_dict()))


if __name__ == "__main__":
    main()
