"""Topic 1: what the device and the host charge: context and workspaces, pinned memory, the link, an op, a swap, an update."""

from __future__ import annotations

import mmap
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor

from gpu.experiment import Figures, Setting
from overspill.models import load, optimizer_named
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

from .jobs import synchronize

MIB = 1 << 20
PINNED_BYTES = 1 << 30
COPY_BYTES = 256 * MIB
ROUNDS = 5
SMALL_OPS = 10_000
SWAPS = 300
SWAP_BYTES = MIB
UPDATES = 10


def context(setting: Setting) -> Figures:
    """Bytes that are gone from the device, and bytes that PyTorch reserved, after each first of its kind."""
    found: Figures = {"before_bytes": _used_before_us()}

    def see(what: str) -> None:
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        found[f"{what}_used_bytes"] = total - free
        found[f"{what}_beside_allocator_bytes"] = total - free - reserved
        found[f"{what}_allocated_bytes"] = torch.cuda.memory_allocated()
        setting.note(**found)

    torch.cuda.init()
    one = torch.ones(1, device=setting.device)
    see("context")
    one + one
    see("first_kernel")
    matrix = torch.ones(512, 512, device=setting.device, requires_grad=True)
    product = matrix @ matrix
    see("first_product")
    product.sum().backward()
    see("first_backward")  # autograd's thread has a cuBLAS handle of its own
    image = torch.ones(8, 64, 56, 56, device=setting.device, requires_grad=True)
    weight = torch.ones(64, 64, 3, 3, device=setting.device, requires_grad=True)
    torch.nn.functional.conv2d(image, weight, padding=1).sum().backward()
    see("first_convolution")
    return found


def _used_before_us() -> int | None:
    """Bytes that are used on the device before this process has a context; None where nvidia-smi does not say."""
    with suppress(OSError, ValueError):
        words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
        return int(said.splitlines()[0]) * MIB
    return None


def pinned(setting: Setting) -> Figures:
    """Seconds to pin a GiB, by registering a map of pages as the pinned store does and by cudaHostAlloc as PyTorch does."""
    nbytes = PINNED_BYTES // 64 if setting.small else PINNED_BYTES
    torch.cuda.init()
    cudart = torch.cuda.cudart()
    pages = mmap.mmap(-1, nbytes)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    touched = _seconds(lambda: memory.fill_(1))
    begun = time.perf_counter()
    refused = int(cudart.cudaHostRegister(memory.data_ptr(), nbytes, 0))
    registered = time.perf_counter() - begun
    found: Figures = {"bytes": nbytes, "touch_seconds": touched, "register_seconds": registered, "refused": refused}
    if not refused:
        found["unregister_seconds"] = _seconds(lambda: cudart.cudaHostUnregister(memory.data_ptr()))
    found["host_alloc_seconds"] = _seconds(lambda: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    return found


def bandwidth(setting: Setting) -> Figures:
    """Bytes a second over the link each way and both ways at once, the latency of a page, and the device's own copy rate."""
    nbytes = COPY_BYTES // 64 if setting.small else COPY_BYTES
    outward, inward = torch.cuda.Stream(), torch.cuda.Stream()
    device = [torch.ones(nbytes, dtype=torch.uint8, device=setting.device) for _ in range(2)]
    host = [torch.ones(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def out(n: int = nbytes) -> None:
        with torch.cuda.stream(outward):
            host[0][:n].copy_(device[0][:n], non_blocking=True)

    def back(n: int = nbytes) -> None:
        with torch.cuda.stream(inward):
            device[1][:n].copy_(host[1][:n], non_blocking=True)

    def both() -> None:
        out()
        back()

    def here() -> None:
        device[1].copy_(device[0])

    found: Figures = {"bytes": nbytes}
    found["offload_bytes_per_second"] = nbytes / _best(out)
    found["prefetch_bytes_per_second"] = nbytes / _best(back)
    both_seconds = _best(both)
    found["both_ways_bytes_per_second"] = 2 * nbytes / both_seconds
    apart = nbytes / found["offload_bytes_per_second"] + nbytes / found["prefetch_bytes_per_second"]
    found["duplex_share"] = both_seconds / apart
    found["page_out_seconds"], found["page_back_seconds"] = _best(lambda: out(4096)), _best(lambda: back(4096))
    found["device_copy_bytes_per_second"] = 2 * nbytes / _best(here)
    return found


def host_time(setting: Setting) -> Figures:
    """Seconds of the host for one small op, one swap by the engine, and one update of GPT-2's weights."""
    count = SMALL_OPS // 10 if setting.small else SMALL_OPS
    one, add = torch.ones(1, device=setting.device), torch.ops.aten.add.Tensor

    def ops() -> None:
        for _ in range(count):
            add(one, one)

    found: Figures = {"add_seconds": _host_seconds(setting, ops) / count}
    setting.note(**found)
    found["swap_seconds"] = _swap_seconds(setting)
    found["adds_a_swap"] = found["swap_seconds"] / found["add_seconds"]
    setting.note(**found)
    module = load("gpt2", small=setting.small).module.to(setting.device)
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    found["parameters"] = len(parameters)
    for name, foreach in (("foreach", True), ("single", False)):
        optimizer = optimizer_named("adamw")(parameters)
        for group in optimizer.param_groups:
            group["foreach"] = foreach
        found[f"adamw_{name}_seconds"] = _host_seconds(setting, optimizer.step, UPDATES)
    return found


def _swap_seconds(setting: Setting) -> float:
    """Host seconds of one tensor's way out and back."""
    device = torch.device(setting.device)
    engine = make_engine(make_store(None if setting.is_cuda else "host", device), device)
    source = torch.ones(SWAP_BYTES, dtype=torch.uint8, device=device)

    def swaps() -> None:
        for _ in range(SWAPS):
            handle = engine.offload(source)
            engine.await_offload(handle)
            engine.await_prefetch(engine.prefetch(handle))

    try:
        return _host_seconds(setting, swaps, 3) / SWAPS
    finally:
        engine.close()


def _host_seconds(setting: Setting, action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median seconds until `action` returns, with the device idle before."""
    action()
    found = []
    for _ in range(rounds):
        synchronize(setting)
        found.append(_seconds(action))
    return statistics.median(found)


def _seconds(action: Callable[[], object | Tensor]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def _best(action: Callable[[], None]) -> float:
    """Seconds of the fastest of some rounds, from an idle device to an idle device."""
    action()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        action()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return min(found)
