"""How fast a step is with a disk below host memory, next to what its slowest lane takes by itself.

A decoder is trained on the CPU by `train_step` with `store="host+disk"`. Its weights and AdamW's moments take three
times the device's budget and the host's together. Lanes by themselves, in the same turns: compute (the step without a
budget), the copies to and from host memory, and the disk with as many reads and writes of the same sizes, with
O_DIRECT. `python bench/tiers_disk.py` prints the figures; `measured` is for other scripts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core import Verb
from overspill.core.units import format_bytes
from overspill.devices.disks import rates_of
from overspill.plans.plan import Plan
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.transfer import tiers
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.host_store import HostStore
from overspill.runtime.transfer.lanes import Slot, ThreadLane
from overspill.runtime.transfer.stores import whole_pages
from overspill.runtime.transfer.tiers import TieredStore

STATE = 3
"""How many times the budgets of device and host the state takes."""
DEVICE_SHARE = 0.45
"""The device's share of both budgets."""


@dataclass(frozen=True)
class Figures:
    """What was measured, in bytes and seconds (medians of the turns)."""

    state_bytes: int
    device_bytes: int
    host_bytes: int
    disk_written_bytes: int
    disk_read_bytes: int
    least_moved_bytes: int
    step_seconds: float
    compute_seconds: float
    copies_seconds: float
    disk_seconds: float
    same_bits: bool
    unplanned: int
    """Copies that came or went otherwise than planned, in the measured steps."""

    @property
    def slowest_seconds(self) -> float:
        """What the slowest lane takes by itself."""
        return max(self.compute_seconds, self.copies_seconds, self.disk_seconds)

    @property
    def ratio(self) -> float:
        """The step over its slowest lane."""
        return self.step_seconds / self.slowest_seconds


class Decoder(nn.Module):
    """Layers of causal attention and an MLP, with a head apart from the embedding."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(
            width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, words: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1])
        return self.head(self.layers(self.embed(words), mask=mask, is_causal=True))


def loss_of(model: nn.Module, words: Tensor) -> Tensor:
    return F.cross_entropy(model(words)[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def made(width: int, layers: int, words: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(width, layers, words)
    return model, torch.optim.AdamW(model.parameters(), 1e-3, fused=True)


def seconds(run: Callable[[], object]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def settled(store: TieredStore) -> None:
    for lane in store._writers:
        lane.drain()


class SlowDisk(DiskStore):
    """A drive whose reads and writes share `bytes_per_second`, so that the load of the machine matters less."""

    bytes_per_second = float("inf")

    def _move(self, slot: Slot, pieces: Iterable[memoryview], *how: Any) -> None:
        given = list(pieces)
        with _DRIVE:
            begun = time.perf_counter()
            super()._move(slot, given, *how)
            left = sum(map(len, given)) / self.bytes_per_second - (time.perf_counter() - begun)
            time.sleep(max(0.0, left))


_DRIVE = threading.Lock()


class LoneDisk:
    """The reads and writes of one step of a plan, by the same calls and threads, with nothing else running."""

    def __init__(self, plan: Plan, directory: Path) -> None:
        assert plan.tiers is not None
        self._disk = SlowDisk(directory, direct=True)
        sizes = {stay.tensor: whole_pages(plan.graph.tensors[stay.tensor].nbytes) for stay in plan.tiers.stays}
        self._slots = {tensor: self._disk.allocate(nbytes) for tensor, nbytes in sizes.items()}
        self._memory = HostStore()
        self._memory.reserve(2 * max(sizes.values()))
        self._pieces = [self._memory.shown(self._memory.allocate(max(sizes.values())), max(sizes.values()), None)
                        for _ in range(2)]  # fmt: skip
        self._write = ThreadLane("write", lambda slot, _: self._disk.write(slot, self._pieces[0][: slot.nbytes]))
        self._read = ThreadLane("read", lambda slot, _: self._disk.read(slot, self._pieces[1][: slot.nbytes]))
        self._stays = sorted(plan.tiers.stays, key=lambda stay: stay.needed)
        for slot in self._slots.values():
            self._disk.write(slot, self._pieces[0][: slot.nbytes])

    def step(self) -> None:
        nothing = torch.empty(0).untyped_storage()
        for stay in self._stays:
            self._read.submit(self._slots[stay.tensor], nothing)
            if stay.is_written:
                self._write.submit(self._slots[stay.tensor], nothing)
        self._read.drain()
        self._write.drain()

    def close(self) -> None:
        self._read.close()
        self._write.close()
        self._disk.close()


def copies_seconds(plan: Plan) -> float:
    """The seconds of the copies to and from host memory of one step, one behind the other."""
    tensors = [plan.graph.tensors[i.target].nbytes for i in plan.schedule.instructions
               if i.verb in (Verb.OFFLOAD, Verb.PREFETCH)]  # fmt: skip
    here, there = torch.zeros(max(tensors), dtype=torch.uint8), torch.zeros(max(tensors), dtype=torch.uint8)

    def run() -> None:
        for nbytes in tensors:
            here[:nbytes].copy_(there[:nbytes])

    return seconds(run)


def measured(
    directory: Path,
    *,
    width: int = 512,
    layers: int = 12,
    words: int = 1024,
    batch: int = 2,
    length: int = 64,
    turns: int = 5,
    rate: str | None = None,
) -> Figures:
    """Train the decoder by both, in turns, and return the figures; `rate` is that of a slower drive, as `100MB/s`."""
    if rate is not None:
        SlowDisk.bytes_per_second = rates_of(rate)[0]
        tiers.DiskStore = SlowDisk  # type: ignore[attr-defined]
    model, optimizer = made(width, layers, words)
    plain, plain_optimizer = made(width, layers, words)
    state = 3 * sum(parameter.nbytes for parameter in model.parameters())
    device = int(DEVICE_SHARE * state / STATE)
    host = state // STATE - device
    step: TrainStep = overspill.train_step(
        model,
        loss_of,
        optimizer,
        budget=device,
        store="host+disk",
        store_dir=directory,
        host_budget=host,
        disk_bandwidth=rate,
    )
    drawn = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, words, (batch, length), generator=drawn) for _ in range(turns + 3)]

    def by_plain(given: Tensor) -> Tensor:
        plain_optimizer.zero_grad()
        loss = loss_of(plain, given)
        loss.backward()
        plain_optimizer.step()
        return loss.detach()

    same = all(torch.equal(step(given), by_plain(given)) for given in batches[:3])
    (plan,) = step.plans
    assert plan.tiers is not None
    assert step.engine is not None
    store = step.engine.store
    assert isinstance(store, TieredStore)
    alone = LoneDisk(plan, directory)
    took: dict[str, list[float]] = {"step": [], "compute": [], "copies": [], "disk": []}
    found: list[Tensor] = []

    def by_tiers(given: Tensor) -> None:
        found.append(step(given))
        settled(store)

    before = store.unplanned
    for given in batches[3:]:
        found.clear()
        took["step"].append(seconds(partial(by_tiers, given)))
        took["compute"].append(seconds(lambda: found.append(by_plain(given))))  # noqa: B023 - called at once
        took["copies"].append(copies_seconds(plan))
        took["disk"].append(seconds(alone.step))
        same = same and torch.equal(*found)
    unplanned = store.unplanned - before
    alone.close()
    same = same and all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    step.close()
    middle = {name: statistics.median(each) for name, each in took.items()}
    return Figures(
        state, device, host, plan.disk_written_bytes, plan.disk_read_bytes, plan.tiers.least_moved_bytes,
        middle["step"], middle["compute"], middle["copies"], middle["disk"], same, unplanned,
    )  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--dir", type=Path, default=Path(os.environ.get("TMPDIR", tempfile.gettempdir())))
    arguments.add_argument("--width", type=int, default=512)
    arguments.add_argument("--layers", type=int, default=12)
    arguments.add_argument("--rate", help="Slow the drive down to this, as 100MB/s.")
    arguments.add_argument("--turns", type=int, default=5)
    arguments.add_argument("--out", type=Path, help="Save the figures there, as JSON.")
    asked = arguments.parse_args()
    torch.set_num_threads(1)
    figures = measured(asked.dir, width=asked.width, layers=asked.layers, turns=asked.turns, rate=asked.rate)
    moved = figures.disk_written_bytes + figures.disk_read_bytes
    print(f"state {format_bytes(figures.state_bytes)}, device {format_bytes(figures.device_bytes)}, "
          f"host {format_bytes(figures.host_bytes)}; same bits: {figures.same_bits}")  # fmt: skip
    print(f"to the disk {format_bytes(figures.disk_written_bytes)} and back {format_bytes(figures.disk_read_bytes)} "
          f"a step, {moved / max(1, figures.least_moved_bytes):.3f} of the lower bound; "
          f"{figures.unplanned} copies unplanned")  # fmt: skip
    print(f"step {figures.step_seconds:.3f} s; by themselves: compute {figures.compute_seconds:.3f} s, "
          f"copies {figures.copies_seconds:.3f} s, disk {figures.disk_seconds:.3f} s; ratio {figures.ratio:.3f}")  # fmt: skip
    if asked.out is not None:
        asked.out.write_text(json.dumps(asdict(figures) | {"ratio": figures.ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
