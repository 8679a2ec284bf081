"""What an estimate costs: the CPU seconds of fresh `overspill estimate` commands, beside those of `import torch` alone.

    python bench/estimate_cpu.py [--repeats 3] [--out bench/results/estimate_cpu.json]

The least of a few repeats counts, user and system time on all cores; other work on the machine makes it larger, and
`import torch` with it. Prints one line a command, and writes the figures as JSON where `--out` says.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import torch
from paired import json_record

JOBS = {
    "resnet50": "resnet50 --batch 32",
    "1.3 B decoder": "decoder:width=2048,heads=16,depth=24 --batch 1 --optimizer adamw",
    "64 B decoder, one GPU": "decoder:width=8192,heads=64,depth=80 --batch 1 --optimizer adamw",
    "175 B decoder, FSDP": "decoder:width=12288,heads=96,depth=96 --batch 1 --optimizer adamw --parallel fsdp --gpus 64",
}


def cpu_seconds(command: list[str], repeats: int) -> float:
    """The least CPU time that `command` took. Raises CalledProcessError where it fails."""
    taken = []
    for _ in range(repeats):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return min(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    commands = {"import torch": [sys.executable, "-c", "import torch"]}
    commands |= {name: [sys.executable, "-m", "overspill", "estimate", *job.split()] for name, job in JOBS.items()}
    rows = []
    for name, command in commands.items():
        rows.append({"job": name, "cpu_seconds": round(cpu_seconds(command, arguments.repeats), 2)})
        print(f"{name:24} {rows[-1]['cpu_seconds']:6.2f} CPU s", flush=True)
    if arguments.out is not None:
        arguments.out.write_text(json_record(torch.device("cpu"), rows=rows))


if __name__ == "__main__":
    main()
