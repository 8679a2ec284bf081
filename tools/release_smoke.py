"""What an installed Overspill must do where nothing else is, run by `release.py` in a fresh environment and an empty directory.

Every command is a process of its own, without a compiler on its PATH. Prints one line; the exit code says whether all held.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
BLOCKS = "id,lower,upper,size\na,0,4,100\nb,2,6,50\nc,4,8,100\n"
SCRIPT = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
"""


def overspill(command: str) -> dict[str, Any]:
    """The JSON object that `overspill COMMAND --json` prints."""
    environment = {**os.environ, "PATH": str(BIN), "PYTHONNOUSERSITE": "1"}  # no compiler, and no other Overspill
    words = [str(BIN / "overspill"), *command.split(), "--json"]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        sys.exit(f"overspill {command}: {done.returncode}: {done.stderr.strip().splitlines()[-1:]}")
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def main() -> None:
    """Run the suite."""
    Path("blocks.csv").write_text(BLOCKS, encoding="utf-8")
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    found = {finding["what"]: finding for finding in overspill("doctor")["findings"]}
    lists = {name: overspill(name)[name] for name in ("models", "policies", "devices")}
    held = {
        "doctor": found["overspill"]["state"] == found["torch"]["state"] == "works"
        and found["C++ compiler"]["state"] == "missing",
        "the lists": all(len(entries) > 5 for entries in lists.values()),
        "estimate": overspill("estimate gpt2 --batch 2 --gpu t4")["fits"] is True,
        "estimate --script": overspill("estimate --script script.py --gpu t4")["iterations"] == 3,
        "plan": overspill("plan resnet18 --small --batch 16 --budget 60%")["feasible"] is True,
        "compare": len(overspill("compare resnet18 --small --batch 16 --gpu t4 --policies auto,checkpoint")["rows"])
        == 2,
        "train --check": overspill("train resnet18 --small --batch 64 --budget 70% --check")["identical"] is True,
        "demo": overspill("demo --no-open")["identical"] is True,
        "pack": overspill("pack blocks.csv")["peak_bytes"] == 150,
    }
    if failed := [name for name, held_here in held.items() if not held_here]:
        sys.exit(f"not as it should be: {', '.join(failed)}")
    version = ".".join(map(str, sys.version_info[:3]))
    print(f"on {version} with torch {found['torch']['found']}, without a compiler: {', '.join(held)}")


if __name__ == "__main__":
    main()
