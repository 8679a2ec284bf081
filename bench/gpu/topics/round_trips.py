"""Topic 2: do bytes come back as they left, when compute runs behind the host and freed memory is written again at once?"""

from __future__ import annotations

import random

import torch

from gpu.experiment import Figures, Setting
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

TRIPS = 200
AT_ONCE = 4
SLEEP_CYCLES = 2_000_000
"""About a millisecond of a GPU: longer than the copies that must wait for it."""
MOST_BYTES = 16 << 20


def trips(setting: Setting, *, late: bool) -> Figures:
    """How many of the tensors came back wrong; `late`: the kernel that makes each waits behind a sleep on the device."""
    torch.manual_seed(0)
    draw = random.Random(0)
    device = torch.device(setting.device)
    engine = make_engine(make_store(None if setting.is_cuda else "host", device), device)
    most = MOST_BYTES // 64 if setting.small else MOST_BYTES
    wrong = moved = 0
    try:
        for _ in range(TRIPS // AT_ONCE):
            sizes = [draw.randrange(1, most // 4) for _ in range(AT_ONCE)]
            expected, handles = [], []
            for size in sizes:
                source = torch.randint(1 << 30, (size,), dtype=torch.int32, device=device)
                _sleep(setting, late=late)
                source.add_(1)  # what has to be copied is made here, behind the sleep
                expected.append(source.clone())
                handles.append(engine.offload(source))
                moved += source.nbytes
                engine.await_offload(handles[-1])
                del source
                torch.full((size,), 7, dtype=torch.int32, device=device)  # takes the memory that was just freed
            _sleep(setting, late=late)
            arriving = [engine.prefetch(handle) for handle in handles]
            for back, original in zip(arriving, expected, strict=True):
                engine.await_prefetch(back)
                wrong += not torch.equal(back, original)
    finally:
        engine.close()
    return {"trips": TRIPS, "wrong": wrong, "bytes": moved}


def _sleep(setting: Setting, *, late: bool) -> None:
    if late and setting.is_cuda:
        torch.cuda._sleep(SLEEP_CYCLES)
