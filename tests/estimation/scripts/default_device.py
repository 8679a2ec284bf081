"""Everything is made on the default device; activations are recomputed."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

torch.set_default_device("cuda")
torch.set_default_dtype(torch.bfloat16)
torch.set_float32_matmul_precision("high")


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(6))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()


model = Deep()
optimizer = torch.optim.RMSprop(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(512, 256)), 64, shuffle=True, generator=torch.Generator(device="cuda"))
for _ in range(3):
    bar = tqdm(loader)
    for (x,) in bar:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        bar.set_postfix(loss=f"{loss.item():.3f}", memory=torch.cuda.memory_allocated())
