"""A GPT of random weights, trained, evaluated and saved by Hugging Face's Trainer."""

import numpy as np
import torch
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4))
data = [{"input_ids": row, "labels": row} for row in torch.randint(0, 256, (44, 64))]


def accuracy(prediction):
    return {
        "accuracy": (prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:])
        .astype(np.float32)
        .mean()
        .item()
    }


arguments = TrainingArguments(
    "out", num_train_epochs=2, per_device_train_batch_size=8, per_device_eval_batch_size=8, logging_steps=1, bf16=True,
    eval_strategy="steps", eval_steps=1, save_steps=1, report_to=[], dataloader_num_workers=2, max_grad_norm=1.0,
    load_best_model_at_end=True, metric_for_best_model="accuracy", eval_on_start=True,
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=data, eval_dataset=data[:24], compute_metrics=accuracy,
    callbacks=[EarlyStoppingCallback(early_stopping_patience=5)],
)  # fmt: skip
trainer.train()
trainer.save_model("out/final")
print(trainer.evaluate())  # noqa: T201
