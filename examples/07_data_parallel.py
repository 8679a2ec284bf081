"""Data parallel training, each process within its own budget: `torchrun --nproc-per-node 2 07_data_parallel.py`.

Run without torchrun, it starts two processes of itself.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun

import overspill


def main() -> None:
    """Train on this process's part of the batch; gradients are averaged over all processes."""
    on_gpus = torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)), nn.Linear(256, 10))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    group = dist.group.WORLD  # named: whatever their parameters were, all ranks begin with those of rank 0
    step = overspill.train_step(model, nn.CrossEntropyLoss(), optimizer, budget="10MiB", process_group=group)

    torch.manual_seed(dist.get_rank())  # a DistributedSampler gives each rank its part of a data set
    inputs, labels = torch.randn(256, 256, device=device), torch.randint(0, 10, (256,), device=device)
    for number in range(3):
        loss = step(inputs, labels)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            mean = loss.item() / dist.get_world_size()
            print(f"step {number}: mean loss {mean:.4f}, planned peak {step.peak_bytes:,} bytes in each process")
    step.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node", "2", __file__])
