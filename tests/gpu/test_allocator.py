"""The live allocator on a real GPU: the bits of PyTorch's allocator, fewer reserved bytes, and what a step costs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, sys, time
import torch, overspill
from torch import nn
used = overspill.allocator() if sys.argv[1] == "planned" else None
torch.manual_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
losses, times = [], []
for turn in range(30):
    length = (512, 384, 448)[turn % 3]
    x = torch.randn(8, length, 512, device="cuda")
    begun = time.perf_counter()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item().hex())
    times.append(time.perf_counter() - begun)
    overspill.step()
print(json.dumps({
    "losses": losses, "step": sorted(times[15:])[7], "reserved": torch.cuda.memory_reserved(),
    "requested": torch.cuda.memory_stats()["requested_bytes.all.peak"],
    "planned": used.figures().counts.planned if used else 0, "weights": float(sum(p.double().sum() for p in model.parameters())).hex(),
}))
"""


def run(kind: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", SCRIPT, kind], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_job_keeps_its_bits_and_reserves_less(record_property: Any) -> None:
    plain, planned = run("pytorch"), run("planned")
    for name in ("step", "reserved", "requested", "planned"):
        record_property(name, (plain[name], planned[name]))
    assert planned["losses"] == plain["losses"]
    assert planned["weights"] == plain["weights"]
    assert planned["planned"] > 0
    assert planned["reserved"] <= min(plain["reserved"], 1.05 * planned["requested"])
    assert planned["step"] <= 1.05 * plain["step"]
