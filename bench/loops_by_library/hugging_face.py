"""Trainer of transformers, and loops with accelerate."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .loop import Line, Trained, loop
from .models import llama, rows

HF = ("transformers", "accelerate")


def trained_by_trainer(line: Line, model: nn.Module, folder: str, *, by_callback: bool = False, **how: Any) -> Trained:
    """Two micro-batches a step, clipped; the learning rate warms up and falls by a cosine; batches are padded."""
    from transformers import Trainer, TrainingArguments

    settings = {
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_steps": 4, "max_grad_norm": 0.5, "learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_steps": 2,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 0, "disable_tqdm": True,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=folder, **settings | how)
    callbacks = line.callbacks("Budget") if by_callback else None
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(16), eval_dataset=rows(4), callbacks=callbacks)
    if not by_callback:
        line.forward(trainer.model)
    trainer.train()
    return Trained(logged(trainer), [trainer.model], [trainer.optimizer], ends=by_callback)


def logged(trainer: Any) -> list[tuple[Any, ...]]:
    """Losses and norms of gradients that a trainer has logged, those of evaluation too."""
    names = "loss", "eval_loss", "grad_norm"
    return [tuple(entry[name] for name in names if name in entry) for entry in trainer.state.log_history]


@loop("clips, accumulates 2, cosine, padding", needs=HF)
def trainer(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, llama(), folder)


@loop("… by the callback", needs=HF)
def trainer_callback(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, llama(), folder, by_callback=True)


@loop("… gradient checkpointing", needs=HF)
def trainer_checkpointed(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, llama(), folder, gradient_checkpointing=True)


@loop("… bfloat16 by autocast", needs=HF)
def trainer_autocast(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, llama(), folder, bf16=True)


@loop("… tied embeddings", needs=HF)
def trainer_tied(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, llama(tied=True), folder)


@loop("… evaluates and saves every 2 steps", needs=HF)
def trainer_saving(line: Line) -> Trained:
    how: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    folder = tempfile.TemporaryDirectory()
    return replace(trained_by_trainer(line, llama(), folder.name, **how), folder=folder)


@loop("… QLoRA: nf4 with double quantisation, LoRA in bfloat16", needs=(*HF, "peft", "bitsandbytes"))
def trainer_qlora(line: Line) -> Trained:
    with tempfile.TemporaryDirectory() as folder:
        return trained_by_trainer(line, with_lora(quantised()), folder)


def quantised() -> nn.Module:
    """Llama in bfloat16, with linear layers of 4 bits as bitsandbytes makes them."""
    import bitsandbytes as bnb

    model = llama().to(torch.bfloat16)
    how = {"compress_statistics": True, "quant_type": "nf4"}
    for part in [part for layer in model.model.layers for part in (layer.self_attn, layer.mlp)]:
        for name, linear in [(n, c) for n, c in part.named_children() if isinstance(c, nn.Linear)]:
            sizes = linear.in_features, linear.out_features
            layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=torch.bfloat16, **how)
            weight = bnb.nn.Params4bit(linear.weight.data.clone(), requires_grad=False, **how)
            layer.weight = weight._quantize(torch.device("cpu"))
            setattr(part, name, layer)
    return model


def with_lora(model: nn.Module) -> nn.Module:
    """`model` with adapters of rank 8 on queries and values."""
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(model, lora())


def lora() -> Any:
    """The settings of `with_lora`."""
    import peft

    return peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


@loop("loss in the loop, accumulates 2, clips, a scheduler", needs=HF)
def accelerate(line: Line) -> Trained:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = llama()
    line.forward(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    loader = DataLoader(rows(16), batch_size=2)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    figures = []
    for batch in loader:
        with accelerator.accumulate(model):
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                figures.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            figures.append(loss.item())
    return Trained(figures, [model], [optimizer])
