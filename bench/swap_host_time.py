"""What a swap costs the thread that computes: to start and to await an offload and a prefetch of a small tensor.

    python bench/swap_host_time.py [--device cuda] [--store host]

Processor time of that thread, the fastest of some rounds, and as a multiple of the smallest op's, an addition of 16
numbers as lowered graphs call it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import closing

import torch

from overspill.runtime.calibrate import transfer_host_seconds
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.stores import make_store

ADDITIONS = 2000
ROUNDS = 9
BLOCK_BYTES = 16 << 10
RESERVED_BYTES = 16 << 20


def busy_seconds(action: Callable[[], object], count: int) -> float:
    """Seconds that this thread is busy with one `action`."""
    times = []
    for _ in range(ROUNDS):
        begun = time.thread_time()
        for _ in range(count):
            action()
        times.append((time.thread_time() - begun) / count)
    return min(times)


def measure(device: torch.device, store: str | None) -> tuple[float, float]:
    """Seconds of an addition and of a swap."""
    with torch.no_grad(), closing(make_engine(make_store(store, device), device)) as engine:
        engine.store.reserve(RESERVED_BYTES)
        numbers, add = torch.ones(16, device=device), torch.ops.aten.add.Tensor
        addition = busy_seconds(lambda: add(numbers, numbers), ADDITIONS)
        return addition, 2 * transfer_host_seconds(engine, torch.zeros(BLOCK_BYTES, dtype=torch.uint8, device=device))


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--store", default=None)
    arguments = parser.parse_args()
    addition, swap = measure(torch.device(arguments.device), arguments.store)
    print(
        f"{arguments.device}, torch {torch.__version__}: an addition {addition * 1e6:.1f} µs, "
        f"a swap {swap * 1e6:.1f} µs or {swap / addition:.1f} additions"
    )


if __name__ == "__main__":
    main()
