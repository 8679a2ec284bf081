"""A pretrained encoder, frozen in part, with a new head; a transformers model from its configuration."""
# ruff: noqa: B007, T201

import torch
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

config = BertConfig(vocab_size=500, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128)
model = BertForSequenceClassification(config)
for parameter in model.bert.embeddings.parameters():
    parameter.requires_grad = False
device = "cuda:0" if torch.cuda.is_available() else "cpu"
model.to(device)
trained = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=5e-5)
scheduler = get_linear_schedule_with_warmup(optimizer, 10, 100)
model.train()
for step in range(100):
    batch = {
        "input_ids": torch.randint(0, 500, (8, 48)),
        "attention_mask": torch.ones(8, 48, dtype=torch.long),
        "labels": torch.randint(0, 2, (8,)),
    }
    batch = {k: v.to(device) for k, v in batch.items()}
    outputs = model(**batch)
    outputs.loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    predictions = outputs.logits.argmax(dim=-1)
    matches = (predictions == batch["labels"]).float().mean().item()
    print({"loss": round(outputs.loss.item(), 4), "matches": matches})
