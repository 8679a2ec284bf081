"""One process a GPU, started by the script itself; the model is wrapped for data parallelism."""
# ruff: noqa: T201

import torch
import torch.multiprocessing as mp
from torch import nn


def worker(gpu, gpus, options):
    torch.cuda.set_device(gpu)
    model = nn.DataParallel(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 4))).cuda(gpu)
    optimizer = torch.optim.Adagrad(model.parameters())
    for epoch in range(options["epochs"]):
        inputs, labels = torch.randn(32, 64).cuda(gpu, non_blocking=True), torch.randint(0, 4, (32,)).cuda(gpu)
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{gpu}/{gpus} epoch {epoch}: {loss:.3f}")


if __name__ == "__main__":
    count = torch.cuda.device_count()
    mp.spawn(worker, nprocs=count, args=(count, {"epochs": 20}))
