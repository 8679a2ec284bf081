"""Two gloo ranks that train one decoder by FSDP2 and by planned steps, in turns."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import overspill
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core.units import format_bytes
from overspill.models import load

RANKS, STEPS = 2, 3
DECODER, BATCH = "decoder:width=256,depth=8,heads=8,vocabulary=256,seq_len=32", 4
SHARES = (1.0, 0.7)
FSDP = "FSDP2, reshard_after_forward"


def run(rounds: int) -> None:
    """Train on two ranks, and print peaks and times of a step."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (f"file://{Path(folder) / 'group'}", rounds), nprocs=RANKS)


def _on_rank(rank: int, where: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    built = load(DECODER)
    torch.manual_seed(rank)
    batch = built.make_batch(BATCH)
    # FSDP2 first: its peak is what the plans get a share of, the smaller of both ranks'.
    model, optimizer = _sharded()
    losses: dict[str, list[float]] = {FSDP: []}

    def by_hand() -> Tensor:
        loss = built.loss(model, *batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    steps: dict[str, Callable[[], Tensor]] = {FSDP: by_hand}
    losses[FSDP] += [by_hand().item() for _ in range(2)]
    with allocations() as allocated:
        losses[FSDP].append(by_hand().item())
    present = 3 * sum(p.to_local().nbytes for p in model.parameters())
    peak = torch.tensor(present + peak_of(allocated.changes)[0])
    dist.all_reduce(peak, dist.ReduceOp.MIN)
    peaks = {FSDP: int(peak)}
    # Planned steps within it, and within less.
    for share in SHARES:
        name = f"planned, within {share:.0%} of that"
        own, updates = _sharded()
        step = overspill.train_step(own, built.loss, updates, budget=int(share * int(peak)), store="host")
        losses[name] = [step(*batch).item() for _ in range(2)]
        with step.counted(batch) as found:
            losses[name].append(step(*batch).item())
        peaks[name] = found[0]
        steps[name] = lambda step=step: step(*batch)  # type: ignore[misc]
    # Times, in turns.
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, take in steps.items():
            dist.barrier()
            begun = time.perf_counter()
            for _ in range(STEPS):
                take()
            seconds[name].append((time.perf_counter() - begun) / STEPS)
    if rank == 0:
        _print(losses, peaks, seconds)
    dist.destroy_process_group()


def _sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The decoder as FSDP2 has it, each block a group, and its optimizer."""
    torch.manual_seed(0)
    model: Any = load(DECODER).module
    for block in (*model.blocks, model):
        fully_shard(block)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def _print(losses: dict[str, list[float]], peaks: dict[str, int], seconds: dict[str, list[float]]) -> None:
    print("| way | measured peak of a rank | losses | median step | over FSDP2, round by round (least to most) |")
    print("|---|---|---|---|---|")
    for name, took in seconds.items():
        ratios = sorted(own / hand for own, hand in zip(took, seconds[FSDP], strict=True))
        same = "identical" if losses[name] == losses[FSDP] else "other bits"
        print(
            f"| {name} | {format_bytes(peaks[name])} | {same} | {statistics.median(took):.3f} s "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
        )
