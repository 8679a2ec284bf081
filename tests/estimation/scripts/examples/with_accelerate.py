"""A loop of one's own by accelerate: accumulation, clipping, gathered metrics, a saved state."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
data = TensorDataset(torch.randn(64, 64), torch.randint(0, 10, (64,)))
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, 16, shuffle=True), schedule)
for epoch in range(3):
    model.train()
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                accelerator.print(f"norm {norm.item():.2f}")
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total = accelerator.gather(loss.detach()).mean().item()
    model.eval()
    right = 0
    for x, y in loader:
        with torch.no_grad():
            predictions = accelerator.gather_for_metrics(model(x).argmax(-1))
        right += (predictions == accelerator.gather_for_metrics(y)).sum().item()
    accelerator.print(f"epoch {epoch}: loss {total:.3f}, accuracy {100 * right / len(data):.1f}%")
    accelerator.save_state(f"state_{epoch}")
