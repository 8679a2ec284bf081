"""Measure this machine's CPU, memory and disk store as a Device.

A rate is that of the fastest of several rounds, because other load on the machine only adds time.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from threading import Event
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from overspill.core import Device
from overspill.core.units import format_bytes
from overspill.devices.loader import DEVICES, load_device, physical_bytes

from .collectives import all_gather
from .transfer.disk_store import DiskStore
from .transfer.engine import TransferEngine, make_engine
from .transfer.host_store import HostStore
from .transfer.lanes import Slot, ThreadLane
from .transfer.stores import Store

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
PRODUCT_SIZES = (256, 512, 1024, 1536)
SLOW_PRODUCT_SECONDS = 0.1
"""A product of this many seconds is large enough; the next would take three to eight times as long."""
COPY_BYTES = 64 << 20
BLOCK_BYTES = 16 << 20
BLOCKS = 12
PAGE_BYTES = 4096
PAGE_TRIPS = 100
HOST_ROUNDS = 5
SMALL_OPS = 20_000
SMALL_ELEMENTS = 256
"""Elements of a small parameter."""
COMPUTE_SECONDS = 0.3
"""Seconds that compute runs alone, then alongside transfers, to measure their cost."""
SHARE_ROUNDS = 3
DUPLEX_SHARE = 0.6
"""Both directions at once in this share of their times added up count as full duplex (0.5 would be perfect)."""

Progress = Callable[[str], None]
T = TypeVar("T")


def calibrate(store_dir: str | Path | None = None, progress: Progress | None = None) -> Device:
    """Return this CPU as a measured Device, in about ten seconds.

    Raises the errors of the disk store if it cannot hold its blocks.
    """
    say = progress or (lambda _: None)
    # Measure transfers, compute, and both together.
    engine = make_engine(DiskStore(store_dir), torch.device("cpu"))
    try:
        with torch.no_grad():
            say(f"measuring the disk store with {format_bytes(BLOCKS * BLOCK_BYTES)}")
            transfers = _measure_transfers(engine)
            say("measuring matrix products")
            rates = {str(dtype).removeprefix("torch."): _product_rate(dtype) for dtype in DTYPES}
            say("measuring memory and small ops")
            copy_rate, overhead = _copy_rate(), _op_overhead()
            say("measuring compute beside transfers")
            share = _compute_share(engine.store)
        say("measuring the optimizer's updates")
        updating, update_call = _update_rate(), _update_call()
        say("measuring convolutions and attention")
        efficiency = _efficiency(rates["float32"])
    finally:
        engine.close()
    # The figures, with their sources; the link to other ranks as it is assumed.
    assumed = load_device(Path(str(DEVICES["cpu"])))
    link = ("link_latency_seconds", "link_bytes_per_second")
    return Device(
        name="cpu",
        kind="cpu",
        memory_bytes=physical_bytes(),
        flops_per_second=rates,
        memory_bytes_per_second=copy_rate,
        offload_bytes_per_second=transfers.offload_rate,
        prefetch_bytes_per_second=transfers.prefetch_rate,
        transfer_latency_seconds=transfers.latency_seconds,
        op_overhead_seconds=overhead,
        transfer_host_seconds=transfers.host_seconds,
        full_duplex=transfers.full_duplex,
        context_bytes=0,
        transfer_compute_share=share,
        efficiency=efficiency,
        host_update_bytes_per_second=updating,
        host_update_call_seconds=update_call,
        link_latency_seconds=assumed.link_latency_seconds,
        link_bytes_per_second=assumed.link_bytes_per_second,
        sources=_sources() | {figure: assumed.sources[figure] for figure in link},
    )


def calibrate_link(device: Device, progress: Progress | None = None) -> Device:
    """Return `device` with the measured link between the ranks of the default process group.

    The figures are those that its collectives reach. All ranks call this together.
    """
    (progress or (lambda _: None))(f"measuring all-gathers of {dist.get_world_size()} ranks")
    ranks = dist.get_world_size()

    def gather(nbytes: int) -> float:
        part, whole = (
            torch.zeros(nbytes // ranks, dtype=torch.uint8),
            torch.empty(nbytes // ranks * ranks, dtype=torch.uint8),
        )
        return _fastest(lambda: all_gather(whole, part), rounds=5)

    small, large = gather(PAGE_BYTES), gather(COPY_BYTES)
    figures = torch.tensor([small / (ranks - 1), (ranks - 1) / ranks * COPY_BYTES / max(large - small, 1e-9)])
    dist.broadcast(figures, 0)  # as rank 0 has measured it
    how = f"{_by()}: all_gather_single of {ranks} ranks, {dist.get_backend()}, of"
    sources = {
        "link_latency_seconds": f"{how} {format_bytes(PAGE_BYTES)}, by hop",
        "link_bytes_per_second": f"{how} {format_bytes(COPY_BYTES)}",
    }
    return replace(
        device,
        link_latency_seconds=float(figures[0]),
        link_bytes_per_second=float(figures[1]),
        sources={**device.sources, **sources},
    )


def _fastest(action: Callable[[], object], rounds: int = 3) -> float:
    """Return the seconds of the fastest of `rounds`, after a warm-up."""
    action()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times)


# -- transfers


@dataclass(frozen=True)
class _Transfers:
    offload_rate: float
    prefetch_rate: float
    latency_seconds: float
    host_seconds: float
    full_duplex: bool


def _measure_transfers(engine: TransferEngine) -> _Transfers:
    """Return transfer rates of the store each way, and the fixed time of one transfer.

    These are the rates of the engine with nothing else running.
    """
    blocks = [torch.zeros(BLOCK_BYTES, dtype=torch.uint8) for _ in range(BLOCKS)]
    engine.store.reserve(2 * BLOCKS * BLOCK_BYTES)
    _offload(engine, blocks)  # the first round fills the arena; its slots are free again when the handles are gone
    out, back, both = zip(*(_round(engine, blocks) for _ in range(3)), strict=True)
    # The fixed time, by transfers of one page.
    page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    round_trips = [_timed(lambda: _prefetch(engine, _offload(engine, [page])))[0] for _ in range(PAGE_TRIPS)]
    busy = transfer_host_seconds(engine, page)
    nbytes = BLOCKS * BLOCK_BYTES
    return _Transfers(
        offload_rate=nbytes / min(out),
        prefetch_rate=nbytes / min(back),
        latency_seconds=median(round_trips) / 2,
        host_seconds=busy,
        full_duplex=min(both) < DUPLEX_SHARE * (min(out) + min(back)),
    )


def transfer_host_seconds(engine: TransferEngine, block: Tensor) -> float:
    """Return the seconds that this thread spends on one transfer of `block`, half a swap."""
    _prefetch(engine, _offload(engine, [block]))
    times = []
    for _ in range(HOST_ROUNDS):
        begun = time.thread_time()
        for _ in range(PAGE_TRIPS):
            _prefetch(engine, _offload(engine, [block]))
        times.append((time.thread_time() - begun) / PAGE_TRIPS / 2)
    return min(times)


def _round(engine: TransferEngine, blocks: list[Tensor]) -> tuple[float, float, float]:
    """Return the seconds to offload `blocks`, to prefetch them, and for both at once."""
    out, handles = _timed(lambda: _offload(engine, blocks))
    back = _timed(lambda: _prefetch(engine, handles))[0]
    return out, back, _timed(lambda: _both_ways(engine, blocks, handles))[0]


def _timed(action: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds of `action`, and its result."""
    begun = time.perf_counter()
    result = action()
    return time.perf_counter() - begun, result


def _offload(engine: TransferEngine, blocks: list[Tensor]) -> list[Tensor]:
    handles = [engine.offload(block) for block in blocks]
    for handle in handles:
        engine.await_offload(handle)
    return handles


def _prefetch(engine: TransferEngine, handles: list[Tensor]) -> list[Tensor]:
    tensors = [engine.prefetch(handle) for handle in handles]
    for tensor in tensors:
        engine.await_prefetch(tensor)
    return tensors


def _both_ways(engine: TransferEngine, blocks: list[Tensor], handles: list[Tensor]) -> list[Tensor]:
    """Offload `blocks` while the tensors of `handles` come back."""
    leaving = [engine.offload(block) for block in blocks]
    arrived = _prefetch(engine, handles)
    for handle in leaving:
        engine.await_offload(handle)
    return leaving + arrived


def _compute_share(store: Store) -> float:
    """Return the share of compute time that a concurrent transfer adds, 0 to 1."""
    matrix = torch.randn(512, 512)
    count = max(1, round(COMPUTE_SECONDS / _fastest(lambda: matrix @ matrix)))

    def compute() -> None:
        for _ in range(count):
            matrix @ matrix

    compute()
    ratios = []
    for _ in range(SHARE_ROUNDS):  # in pairs, so that what else the machine does weighs on both
        alone = _timed(compute)[0]
        with _transferring(store):
            ratios.append(_timed(compute)[0] / alone)
    return min(1.0, max(0.0, median(ratios) - 1))


@contextmanager
def _transferring(store: Store) -> Iterator[None]:
    """Write to and read from `store` on a lane, within the context."""
    stop = Event()

    def transfer(slot: Slot, block: Tensor) -> None:
        while not stop.is_set():
            store.write(slot, block)
            store.read(slot, block)

    # One endless job on the lane, until the context ends.
    lane, slot = ThreadLane("calibrate", transfer), store.allocate(BLOCK_BYTES)
    ticket = lane.submit(slot, torch.zeros(BLOCK_BYTES, dtype=torch.uint8).untyped_storage())
    try:
        yield
    finally:
        stop.set()
        try:
            ticket.wait()  # first, for a lane that is closed drops what has not begun
        finally:
            lane.close()
            store.release(slot)


# -- compute


def _product_rate(dtype: torch.dtype) -> float:
    """Return the FLOP/s of square matrix products of `dtype`, of sizes that take little time."""
    best = 0.0
    for size in PRODUCT_SIZES:
        matrix = torch.ones(size, size, dtype=dtype)
        seconds = _fastest(lambda: matrix @ matrix, rounds=2)  # noqa: B023 - called at once
        best = max(best, 2 * size**3 / seconds)
        if seconds > SLOW_PRODUCT_SECONDS:
            break
    return best


def _copy_rate() -> float:
    """Return the bytes per second, read and written, of an op on large tensors.

    Like most ops it allocates its result.
    """
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    return 2 * COPY_BYTES / _fastest(source.clone, rounds=5)


def _update_rate() -> float:
    """Return the bytes per second that an update reads and writes: weights, gradients and two states of AdamW."""
    parameter = torch.nn.Parameter(torch.zeros(COPY_BYTES // 4))
    parameter.grad = torch.ones_like(parameter)
    update = torch.optim.AdamW([parameter], fused=True)
    return 7 * COPY_BYTES / _fastest(update.step, rounds=5)


def _update_call() -> float:
    """Return the seconds of AdamW's update of one small parameter in host memory, each in a call of its own."""
    parameter = torch.nn.Parameter(torch.zeros(SMALL_ELEMENTS))
    parameter.grad = torch.ones_like(parameter)
    step = torch.optim.AdamW([parameter], fused=True).step
    engine = make_engine(HostStore(), torch.device("cpu"))
    try:
        handles = [engine.offload(torch.zeros(SMALL_ELEMENTS)) for _ in range(4)]  # gradient, weight and its state

        def run() -> None:
            for _ in range(PAGE_TRIPS):
                engine.update("calibration", lambda *_: step(), handles, handles[1:])
            engine.updates.finish()

        return _fastest(run) / PAGE_TRIPS
    finally:
        engine.close()


def _op_overhead() -> float:
    """Return the seconds of the smallest op, called as lowered graphs call it."""
    one, add = torch.ones(1), torch.ops.aten.add.Tensor

    def run() -> None:
        value = one
        for _ in range(SMALL_OPS):
            value = add(value, one)

    return _fastest(run) / SMALL_OPS


def _efficiency(peak_rate: float) -> dict[str, float]:
    """Return each layer type's share of the matrix product's rate, for forward and backward together."""
    image, fine, coarse = torch.randn(4, 64, 56, 56), torch.randn(64, 64, 3, 3), torch.randn(256, 64, 1, 1)
    tokens, weight = torch.randn(1024, 768), torch.randn(3072, 768)
    heads = torch.randn(2, 12, 256, 64)
    pixels = image.shape[0] * 56 * 56
    conv_flops = 2 * pixels * (fine.numel() + coarse.numel())
    # Forward FLOPs, function and inputs of each.
    measured = {
        "conv": (conv_flops, lambda x, f, c: F.conv2d(F.conv2d(x, f, padding=1), c), (image, fine, coarse)),
        "linear": (2 * tokens.shape[0] * weight.numel(), F.linear, (tokens, weight)),
        "attention": (
            4 * heads.numel() * heads.shape[2],
            F.scaled_dot_product_attention,
            (heads, heads.clone(), heads.clone()),
        ),
    }
    return {
        layer: _training_rate(forward_flops, function, inputs) / peak_rate
        for layer, (forward_flops, function, inputs) in measured.items()
    }


def _training_rate(forward_flops: int, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> float:
    """Return the FLOP/s of `function` with backward, which has twice the FLOPs of forward."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    gradient = torch.ones_like(function(*leaves))
    return 3 * forward_flops / _fastest(lambda: torch.autograd.grad(function(*leaves), leaves, gradient))


# -- where the figures come from


def _sources() -> dict[str, str]:
    """Return for each figure how it was measured, when and on which machine."""
    by = _by()
    store = f"{BLOCKS} blocks of {format_bytes(BLOCK_BYTES)} through the disk store, warm"
    # What was measured for each figure.
    how = {
        "flops_per_second": "square matrix products",
        "memory_bytes_per_second": f"copy of {format_bytes(COPY_BYTES)} into a fresh tensor, bytes read and written",
        "offload_bytes_per_second": store,
        "prefetch_bytes_per_second": store,
        "transfer_latency_seconds": "half a round trip of 4 KiB through the disk store",
        "op_overhead_seconds": "addition of two tensors of one element",
        "host_update_bytes_per_second": f"AdamW(fused=True) on {format_bytes(COPY_BYTES)} of float32, read and written",
        "host_update_call_seconds": f"AdamW(fused=True) on {SMALL_ELEMENTS} elements in the thread of updates",
        "transfer_host_seconds": "time of the computing thread, half a round trip of 4 KiB through the disk store",
        "full_duplex": "both directions at once against one after the other",
        "transfer_compute_share": "matrix products beside a lane that writes and reads the disk store",
        "efficiency": "forward and backward of layers as in ResNet-50 and GPT-2, over the float32 matrix product",
    }
    sources = {figure: f"{by}: {what}" for figure, what in how.items()}
    # Two figures are not measured.
    return sources | {
        "memory_bytes": "the machine's own: os.sysconf, physical pages",
        "context_bytes": "a CPU has no context to load",
    }


def _by() -> str:
    return (
        f"measured by overspill calibrate on {datetime.now(UTC).date()}, {_cpu_model()}, {os.cpu_count()} logical "
        f"cores, torch {torch.__version__}"
    )


def _cpu_model() -> str:
    """Return the model name of the processor."""
    with suppress(OSError):
        if found := re.search(
            r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE
        ):
            return found.group(1)
    return platform.processor() or platform.machine()
