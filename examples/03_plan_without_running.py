"""A plan for another machine, made here without a GPU and without the model's memory, and some policies beside it."""

import torch
from torch import nn

import overspill

rows = overspill.compare(
    "resnet18", optimizer="momentum", batch=32, device="titan-x", budget=0.7,
    policies=("in-core", "checkpoint-cost", "auto"),
)  # fmt: skip
for row in rows:
    if row.plan is not None:
        print(
            f"{row.policy:12s} peak {row.plan.peak_bytes:>13,} of {row.plan.unmanaged_peak_bytes:,} bytes, "
            f"moves {row.plan.offloaded_bytes:>13,}, simulated slowdown {row.plan.slowdown:.3f}"
        )

# A model of one's own: nothing of it is run, and it is left as it is.
model = nn.Sequential(
    nn.Linear(512, 2048), *(nn.Sequential(nn.ReLU(), nn.Linear(2048, 2048)) for _ in range(6)), nn.Linear(2048, 10)
)
batch = torch.randn(8192, 512), torch.randint(0, 10, (8192,))
plan = overspill.plan(model, batch, nn.CrossEntropyLoss(), "adamw", device="t4", budget=0.8)
print(f"planned peak {plan.peak_bytes:,} bytes of {plan.unmanaged_peak_bytes:,}; slowdown {plan.slowdown:.3f}")
