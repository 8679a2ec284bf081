"""Trainers of TRL, of sentence-transformers, and Lightning's."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from .hugging_face import logged, lora, quantised
from .loop import Line, Trained, loop
from .models import LENGTH, VOCABULARY, llama, rows, sentence, tokenizer

TRL = ("transformers", "accelerate", "datasets", "trl")
SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 4, "learning_rate": 1e-3,
    "max_grad_norm": 0.5, "logging_steps": 1, "save_strategy": "no", "report_to": [], "use_cpu": True, "seed": 0,
    "disable_tqdm": True, "bf16": False,
}  # fmt: skip


@contextmanager
def working_folder() -> Iterator[str]:
    """A folder for a trainer.

    Within the context, datasets names its sets by numbers: not all that it pickles for a name can be. TRL computes
    log-probabilities in tiles of as many columns as the models have words, not of 32 768, which would be more than them.
    """
    import trl.trainer.utils
    from datasets.fingerprint import Hasher

    count = itertools.count()
    numbered = patch.object(Hasher, "hash", classmethod(lambda *_: f"{next(count):016x}"))
    small = patch.object(trl.trainer.utils, "_CHUNKED_LOGPROB_CHUNK_SIZE", VOCABULARY)
    with tempfile.TemporaryDirectory() as folder, numbered, small:
        yield folder


def trained_by_sft(line: Line, model: nn.Module, folder: str, *, by_callback: bool = False, **how: Any) -> Trained:
    """Supervised fine-tuning, by TRL's own forward over the model's; each batch is padded, as `rows` are."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [row["input_ids"][: LENGTH - 1 - index % 4].tolist() for index, row in enumerate(rows(16))]
    data = Dataset.from_list([{"input_ids": ids, "labels": ids} for ids in texts])
    arguments = SFTConfig(
        output_dir=folder, max_length=64, pad_to_multiple_of=LENGTH, gradient_checkpointing=False, label_names=["labels"],
        dataset_kwargs={"skip_prepare_dataset": True}, **SETTINGS,
    )  # fmt: skip
    callbacks = line.callbacks("Budget") if by_callback else None
    trainer = SFTTrainer(
        model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks, **how
    )
    if not by_callback:
        line.forward(trainer.model)
    trainer.train()
    return Trained(logged(trainer), [trainer.model], [trainer.optimizer], ends=by_callback)


@loop("SFTTrainer, full fine-tuning", needs=TRL)
def sft(line: Line) -> Trained:
    with working_folder() as folder:
        return trained_by_sft(line, llama(), folder)


@loop("SFTTrainer, full fine-tuning, by the callback", needs=TRL)
def sft_callback(line: Line) -> Trained:
    with working_folder() as folder:
        return trained_by_sft(line, llama(), folder, by_callback=True)


@loop("SFTTrainer, LoRA", needs=(*TRL, "peft"))
def sft_lora(line: Line) -> Trained:
    with working_folder() as folder:
        return trained_by_sft(line, llama(), folder, peft_config=lora())


@loop("SFTTrainer, QLoRA", needs=(*TRL, "peft", "bitsandbytes"))
def sft_qlora(line: Line) -> Trained:
    with working_folder() as folder:
        return trained_by_sft(line, quantised(), folder, peft_config=lora())


def reloaded(folder: str) -> Any:
    """A Llama from a folder, from which TRL makes the reference model."""
    from transformers import LlamaForCausalLM

    llama().save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


@loop("DPOTrainer with its reference model", needs=TRL)
def dpo(line: Line) -> Trained:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    with working_folder() as folder:
        pairs = [
            {"prompt": sentence(i, 4), "chosen": " " + sentence(i + 100, 5), "rejected": " " + sentence(i + 200, 5)}
            for i in range(16)
        ]
        arguments = DPOConfig(output_dir=folder, gradient_checkpointing=False, max_length=LENGTH, **SETTINGS)
        trainer = DPOTrainer(
            model=reloaded(folder), args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer()
        )
        line.forward(trainer.model, trainer.ref_model)
        trainer.train()
        return Trained(logged(trainer), [trainer.model, trainer.ref_model], [trainer.optimizer])


@loop("GRPOTrainer with its reference model, which generates", needs=TRL)
def grpo(line: Line) -> Trained:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(len(set(text))) for text in completions]

    with working_folder() as folder:
        prompts = Dataset.from_list([{"prompt": sentence(i, 4)} for i in range(16)])
        arguments = GRPOConfig(
            output_dir=folder, gradient_checkpointing=False, num_generations=2, max_completion_length=4, beta=0.04,
            **SETTINGS | {"max_steps": 3},
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=reloaded(folder), args=arguments, train_dataset=prompts, processing_class=tokenizer(),
            reward_funcs=reward,
        )  # fmt: skip
        line.forward(trainer.model, trainer.ref_model)
        trainer.train()
        return Trained(logged(trainer), [trainer.model, trainer.ref_model], [trainer.optimizer])


@loop("SentenceTransformerTrainer, pairs against the rest of the batch", needs=(*TRL[:3], "sentence_transformers"))
def sentence_transformers(line: Line) -> Trained:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    with working_folder() as folder:
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
            max_position_embeddings=64, hidden_dropout_prob=0.1,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        bert = Transformer(folder)
        model = SentenceTransformer(modules=[bert, Pooling(config.hidden_size)], device="cpu")
        data = Dataset.from_list([{"anchor": sentence(i), "positive": sentence(i + 100)} for i in range(16)])
        arguments = SentenceTransformerTrainingArguments(output_dir=folder, **SETTINGS)
        trainer = SentenceTransformerTrainer(
            model=model, args=arguments, train_dataset=data, loss=MultipleNegativesRankingLoss(model)
        )
        line.forward(trainer.model)
        trainer.train()
        return Trained(logged(trainer), [trainer.model], [trainer.optimizer])


def trained_by_lightning(line: Line, *, by_callback: bool = False) -> Trained:
    """Clips, accumulates 2, with a scheduler."""
    import lightning as L
    from torch.utils.data import DataLoader

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = llama()
            if not by_callback:
                line.forward(self.net)
            self.losses: list[float] = []

        def training_step(self, batch: dict[str, Tensor], _: int) -> Tensor:
            loss: Tensor = self.net(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    with tempfile.TemporaryDirectory() as folder:
        module = Module()
        trainer = L.Trainer(
            max_epochs=1, accelerator="cpu", gradient_clip_val=0.5, accumulate_grad_batches=2, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
            callbacks=line.callbacks("LightningBudget") if by_callback else None,
        )  # fmt: skip
        trainer.fit(module, DataLoader(rows(16), batch_size=2))
        return Trained(module.losses, [module], trainer.optimizers, ends=True)  # fit moves all to the CPU at its end


@loop("clips, accumulates 2, a scheduler", needs=("transformers", "lightning"))
def lightning(line: Line) -> Trained:
    return trained_by_lightning(line)


@loop("… by the callback", needs=("transformers", "lightning"))
def lightning_callback(line: Line) -> Trained:
    return trained_by_lightning(line, by_callback=True)
