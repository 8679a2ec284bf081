"""Fine-tuning within a budget: LoRA with dropout, padded batches, bf16, accumulation, clipping, a schedule, evaluation,
generate() and resuming; by Hugging Face Trainer with `compile`, and by `train_step` in a loop of one's own.

Needs `pip install -c constraints.txt -e ".[recipes]"`; docs/howto/fine_tune.md says what to watch out for.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from measured import Run, same
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import overspill

BUDGET = 0.75
"""A share of what the first step needs; "20GiB" is a size."""
VOCABULARY, LENGTH, PADDING = 128, 24, 0
Sample = dict[str, Tensor]


def make_model() -> nn.Module:
    """A frozen Llama with trained adapters."""
    set_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, pad_token_id=PADDING, **shape))
    adapters = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return get_peft_model(base, adapters)


def sentences(count: int, seed: int) -> list[Sample]:
    """Texts of several lengths, padded to one: what is padding is masked, and no target."""
    drawn = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(LENGTH // 2, LENGTH + 1, (), generator=drawn))
        ids = torch.full((LENGTH,), PADDING)
        ids[:length] = torch.randint(1, VOCABULARY, (length,), generator=drawn)
        mask = (torch.arange(LENGTH) < length).long()
        found.append({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)})
    return found


def written_on(model: nn.Module) -> float:
    """What the model writes after a few words, as a number that tells two texts apart."""
    model.eval()
    words = torch.arange(1, 9).reshape(1, 8)
    text = model.generate(input_ids=words, attention_mask=torch.ones_like(words), max_new_tokens=4, do_sample=True)
    model.train()
    return float((text * torch.arange(1, text.shape[1] + 1)).sum())


def finished(model: nn.Module, losses: list[float]) -> Run:
    return Run([*losses, written_on(model)], {name: value.clone() for name, value in model.state_dict().items()}, 0)


# -- Trainer


def by_trainer(folder: Path, *, budgeted: bool, resume: bool = False) -> Run:
    """Two epochs of five micro-batches in groups of two, or from the checkpoint of the second step on."""
    model = make_model()
    if budgeted:
        model.forward = overspill.compile(model.forward, budget=BUDGET, store="host")  # the one line
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2, bf16=True,
        max_grad_norm=1.0, lr_scheduler_type="cosine", learning_rate=1e-3, logging_steps=1, eval_strategy="steps",
        eval_steps=2, save_steps=2, label_names=["labels"], use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=sentences(19, 1), eval_dataset=sentences(8, 2))
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resume else None)
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return finished(model, losses)


# -- a loop of one's own


def batches(samples: list[Sample], size: int) -> list[Sample]:
    groups = [samples[start : start + size] for start in range(0, len(samples), size)]
    return [{key: torch.stack([sample[key] for sample in group]) for key in group[0]} for group in groups]


def loss_of(model: nn.Module, batch: Sample) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(**batch).loss


def by_loop(folder: Path, *, budgeted: bool, resume: bool = False) -> Run:
    """Two epochs of batches of two micro-batches, the last batch a smaller one."""
    model = make_model()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, 6)
    step: Any = None
    if budgeted:  # in place of what is below
        step = overspill.train_step(model, loss_of, optimizer, budget=BUDGET, store="host", accumulate=2, clip_norm=1.0)
    done, losses = 0, []
    if resume:
        saved = torch.load(folder / "saved.pt", weights_only=False)
        done, losses = saved["step"], saved["losses"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        torch.set_rng_state(saved["random"])

    for number, batch in enumerate(2 * batches(sentences(22, 1), 8), 1):
        if number <= done:
            continue
        loss = step(batch) if step is not None else plain_step(model, batch, optimizer, trained)
        scheduler.step()
        losses.append(loss.item())
        if number == 2 and not resume:
            with torch.no_grad():
                losses.append(loss_of(model.eval(), batch).item())
            losses.append(written_on(model))
            saved = {"step": number, "losses": list(losses), "random": torch.get_rng_state()}
            owners = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
            torch.save(saved | {name: owner.state_dict() for name, owner in owners.items()}, folder / "saved.pt")
    return finished(model, losses)


def plain_step(model: nn.Module, batch: Sample, optimizer: torch.optim.Optimizer, trained: list[Tensor]) -> Tensor:
    """What `train_step` does, in memory for all of it."""
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in zip(*(values.chunk(2) for values in batch.values()), strict=True):
        loss = loss_of(model, dict(zip(batch, part, strict=True))) / 2
        loss.backward()
        total = total + loss.detach()
    nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    return total


def main() -> None:
    for name, train in (("Trainer", by_trainer), ("own loop", by_loop)):
        with tempfile.TemporaryDirectory() as folder:
            plain, budgeted = Path(folder, "plain"), Path(folder, "budgeted")
            for path in (plain, budgeted):
                path.mkdir()
            expected = train(plain, budgeted=False)
            run = train(budgeted, budgeted=True)
            again = train(budgeted, budgeted=True, resume=True)
        print(f"{name}: {len(expected.losses) - 1} losses, the last {expected.losses[-2]:.4f}")
        print(f"{name}: losses, text and weights identical: {same(expected, run)}")
        print(f"{name}: after resuming identical: {same(expected, again)}")


if __name__ == "__main__":
    main()
