"""What one swap costs the host and asks of the driver, as JSON: offload, its wait, prefetch, its wait."""

from __future__ import annotations

import time

import stand_in
import torch
from tests.gpu_rehearsal.host_work import microseconds_of_an_add
from tests.gpu_rehearsal.processes import tell

from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

NBYTES = 1 << 20
ROUNDS, SWAPS = 10, 200


def main() -> None:
    """Swap a tensor out and in again, many times."""
    device = torch.device("cuda", 0)
    engine = make_engine(make_store(None, device), device)
    engine.store.reserve(4 * NBYTES)
    x = torch.empty(NBYTES, dtype=torch.uint8, device=device)

    def swap() -> None:
        handle = engine.offload(x)
        engine.await_offload(handle, x)
        engine.await_prefetch(engine.prefetch(handle))

    swap()
    best = float("inf")
    before = stand_in.counts()
    for _ in range(ROUNDS):
        begun = time.process_time()
        for _ in range(SWAPS):
            swap()
        best = min(best, (time.process_time() - begun) / SWAPS)
    counts = stand_in.counts().since(before)
    add = microseconds_of_an_add()
    found = {"swap_us": best * 1e6, "add_us": add, "adds": best * 1e6 / add}
    tell(found | {name: count / (ROUNDS * SWAPS) for name, count in counts._asdict().items()})
    engine.close()


if __name__ == "__main__":
    main()
