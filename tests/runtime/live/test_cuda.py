"""The path of the live allocator to CUDA, tried on the driver of the stand-in GPU: no GPU is used here."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from tests.runtime.live.driver import COMPILER, build_driver

from overspill.core.errors import RequestError
from overspill.runtime.live import _live
from overspill.runtime.live.allocator import LiveAllocator

HERE = Path(__file__).parent
MIB = 1 << 20

ON_THE_STAND_IN = """
import ctypes, gc, random
from overspill.placement import Events
from overspill.runtime.live.allocator import LiveAllocator
from tests.runtime.live.live import Witness, random_trace

driver = ctypes.CDLL("libcuda.so.1")
for pool in ("best-fit", "two-ended", "virtual"):
    witness = Witness(LiveAllocator("cuda", pool, main_bytes=32 << 20, chunk_bytes=2 << 20))
    witness.free(witness.allocate(100))
    waits = driver.stand_in_event_syncs()
    witness.allocate(100, 1)  # a pool that mixes streams must know that the first one is done
    assert driver.stand_in_event_syncs() - waits == (pool == "two-ended")
    r = random.Random(0)
    for _ in range(3):
        for address in [witness.allocate(r.randrange(1, 8 << 20), stream) for stream in (0, 1, 0, 1)]:
            witness.use(address, 2)
            witness.check_all()
            witness.free(address)
    trace = random_trace(r, 40, 2)
    for _ in range(3):
        witness.run(Events.of(trace))
    now = witness.allocator.statistics()
    assert now.deferred, now
    witness.allocate(5 << 20)  # the allocator goes away with blocks that are live
    del witness
    gc.collect()
    assert driver.stand_in_leaks() == 0, (pool, driver.stand_in_leaks())
"""


@pytest.mark.long
@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
def test_the_driver_is_called_by_its_rules_and_gets_all_back(tmp_path: Path) -> None:
    environment = os.environ | build_driver(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", ON_THE_STAND_IN],
        cwd=HERE.parents[2], env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_functions_that_pytorch_calls_reach_the_installed_allocator() -> None:
    library = ctypes.CDLL(_live.__file__)
    library.overspill_malloc.restype = ctypes.c_void_p
    library.overspill_malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.overspill_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    library.overspill_record_stream.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
    device, stream, copy = 63, 0x7000, 0x8000
    allocator = LiveAllocator("host", events_by_hand=True)
    assert allocator._core.install(device)
    assert allocator._core.install(device)
    assert not LiveAllocator("host")._core.install(device)

    address = library.overspill_malloc(3 * MIB, device, stream)
    library.overspill_record_stream(address, copy)
    library.overspill_free(address, 3 * MIB, device, stream)
    assert library.overspill_malloc(0, device, stream) is None
    now = allocator.statistics()
    assert (now.requests, now.deferred, now.allocated_bytes) == (1, 1, 0)
    library.overspill_empty_cache()
    assert allocator.statistics().reserved_bytes == 0


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a driver")
def test_without_a_driver_cuda_is_refused_in_one_line() -> None:
    with pytest.raises(RequestError, match="'host' works anywhere"):
        LiveAllocator("cuda")


class Pluggable:
    """A stand-in for `torch.cuda.memory.CUDAPluggableAllocator`, with the hooks that PyTorch 2.11 to 2.14 has."""

    def __init__(self, path: str, malloc: str, free: str) -> None:
        library = ctypes.CDLL(path)
        self.functions = [getattr(library, malloc), getattr(library, free)]
        self.hooks: dict[str, int] = {}

    def allocator(self) -> Pluggable:
        return self

    def set_record_stream_fn(self, pointer: int) -> None:
        self.hooks["record_stream"] = pointer

    def set_reset_fn(self, pointer: int) -> None:
        self.hooks["reset"] = pointer

    def set_begin_allocate_to_pool(self, pointer: int) -> None:
        self.hooks["begin_pool"] = pointer


def test_pytorch_is_given_all_four_functions_and_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = LiveAllocator("host", index=62)
    allocator.device = "cuda"
    with pytest.raises(RequestError, match="no CUDA device") if not torch.cuda.is_available() else nullcontext():
        allocator.as_pluggable()
    taken: list[Pluggable] = []

    def change(pluggable: Pluggable) -> None:
        if taken:
            raise RuntimeError("Can't swap an already initialized allocator")
        taken.append(pluggable)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda.memory, "CUDAPluggableAllocator", Pluggable)
    monkeypatch.setattr(torch.cuda.memory, "change_current_allocator", change)
    allocator.serve_pytorch()
    assert len(taken[0].functions) == 2
    assert all(taken[0].hooks[name] for name in ("record_stream", "reset", "begin_pool"))
    with pytest.raises(RequestError, match="before it uses"):
        allocator.serve_pytorch()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RequestError, match="before it uses"):
        allocator.serve_pytorch()
    other = LiveAllocator("host", index=62)
    other.device = "cuda"
    with pytest.raises(RequestError, match="another live allocator"):
        other.as_pluggable()
