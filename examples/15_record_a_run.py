"""What some steps of a real run did, for Perfetto, for PyTorch's memory_viz, and as a page: docs/tools.md explains it.

python examples/15_record_a_run.py    # writes run.json, run.pickle and run.html
"""

import torch
import torch.nn.functional as F
from torch import nn

import overspill

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)]
model = overspill.compile(nn.Sequential(*layers, nn.Linear(512, 10)), budget=0.7, store="host")
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
inputs, labels = torch.randn(2048, 512), torch.randint(0, 10, (2048,))


def train() -> None:
    """One step of an ordinary loop."""
    optimizer.zero_grad()
    F.cross_entropy(model(inputs), labels).backward()
    optimizer.step()


for _ in range(2):
    train()
with overspill.record(model) as recording:  # anywhere in a run; nothing is planned anew
    for _ in range(3):
        train()
train()  # as before

print(recording)
recording.trace("run.json")
recording.snapshot("run.pickle")
recording.report("run.html")
