"""A moving average of the weights beside them, weights that are drawn and inspected by hand, and a resumed run."""
# ruff: noqa: NPY002, PTH110

import copy
import logging
import os
import random
import sys

import numpy as np
import torch
from torch import nn

logging.basicConfig(level=logging.INFO, stream=sys.stdout)
log = logging.getLogger(__name__)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    os.environ["PYTHONHASHSEED"] = str(seed)


class EMA:
    def __init__(self, model, decay=0.999):
        self.module = copy.deepcopy(model).eval()
        self.decay = decay
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        for mine, theirs in zip(self.module.state_dict().values(), model.state_dict().values(), strict=True):
            if mine.dtype.is_floating_point:
                mine.mul_(self.decay).add_(theirs.detach(), alpha=1 - self.decay)


set_seed(42)
model = nn.Sequential(nn.Linear(128, 512), nn.BatchNorm1d(512), nn.GELU(), nn.Linear(512, 8))
with torch.no_grad():
    for name, p in model.named_parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
        log.info("%s mean %s std %s", name, p.mean().item(), p.std().item())
model.cuda()
ema = EMA(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], [10])
if os.path.exists("last.pt"):
    state = torch.load("last.pt", map_location="cuda")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
running = 0.0
for step in range(100):
    x = torch.from_numpy(np.random.rand(32, 128).astype(np.float32)).cuda()
    y = torch.randint(0, 8, (32,)).cuda()
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    ema.update(model)
    running = 0.9 * running + 0.1 * loss.item()
    log.info("step %d loss %s", step, running)
    if step % 50 == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, "last.pt")
