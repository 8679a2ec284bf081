"""Transfer engines over every kind of lane, and what the tests of the engine do with them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.runtime.transfer.fake_cuda import FakeCuda, LateHostStore
from tests.runtime.transfer.fake_runtime import COMPILER, with_native_copies
from torch import Tensor

from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.engine import TransferEngine, make_engine
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import StreamLane, ThreadLane
from overspill.runtime.transfer.stores import Store

CPU = torch.device("cpu")


def with_threads(store: Store) -> TransferEngine:
    return make_engine(store, CPU)


def with_streams(store: Store, cuda: FakeCuda | None = None) -> TransferEngine:
    cuda = cuda or FakeCuda()
    return TransferEngine(store, StreamLane(CPU, store.write, cuda), StreamLane(CPU, store.fetch, cuda))


def with_late_streams() -> TransferEngine:
    cuda = FakeCuda()
    return with_streams(LateHostStore(cuda), cuda)


ENGINES: dict[str, Callable[[], TransferEngine]] = {
    "threads, disk": lambda: with_threads(DiskStore()),
    "threads, host": lambda: with_threads(HostStore()),
    "streams, host": lambda: with_streams(HostStore()),
    "streams, late copies": with_late_streams,
} | ({"native copies, late": with_native_copies} if COMPILER is not None else {})


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def send(engine: TransferEngine, source: Tensor) -> Tensor:
    handle = engine.offload(source)
    engine.await_offload(handle)
    return handle


def bring(engine: TransferEngine, handle: Tensor) -> Tensor:
    tensor = engine.prefetch(handle)
    engine.await_prefetch(tensor)
    return tensor


def transfer_threads(engine: TransferEngine) -> list[str]:
    """The names of the living threads of `engine`'s own lanes (other tests may have left engines behind)."""
    threads = [lane._thread for lane in (engine._outward, engine._inward) if isinstance(lane, ThreadLane)]
    return [thread.name for thread in threads if thread.is_alive()]
