"""A model that `fully_shard` (FSDP2) has sharded, each process within its own budget: `torchrun --nproc-per-node 2 17_sharded.py`.

Run without torchrun, it starts two processes of itself.
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun

import overspill


def main() -> None:
    """Shard as usual, then train by planned steps: gathers of parameters are part of the plan."""
    on_gpus = torch.cuda.device_count() > 1
    dist.init_process_group("nccl" if on_gpus else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    torch.manual_seed(0)  # fully_shard takes each rank's rows of its own parameters
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)), nn.Linear(256, 10))
    model.to(device)
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = overspill.train_step(model, nn.CrossEntropyLoss(), optimizer, budget="4MiB", clip_norm=1.0)

    torch.manual_seed(dist.get_rank())  # a DistributedSampler gives each rank its part of a data set
    inputs, labels = torch.randn(256, 256, device=device), torch.randint(0, 10, (256,), device=device)
    for number in range(3):
        loss = step(inputs, labels)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            mean = loss.item() / dist.get_world_size()
            print(f"step {number}: mean loss {mean:.4f}, planned peak {step.peak_bytes:,} bytes in each process")

    # Checkpoints are FSDP's own: DTensors, which any number of ranks loads.
    paths = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(paths)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=paths[0])
    step.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        torchrun(["--standalone", "--nproc-per-node", "2", __file__])
