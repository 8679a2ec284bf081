"""WHAT: one use of the live allocator by PyTorch's CUDA build, in a process of its own; what came of it, as JSON."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import stand_in
import torch
from tests.gpu_rehearsal.processes import tell
from tests.gpu_rehearsal.trouble import a_step, said
from torch import nn

import overspill
from overspill.core.errors import is_out_of_memory

MIB = 1 << 20


def failure(what: Callable[[], Any]) -> dict[str, Any]:
    try:
        what()
    except Exception as error:  # noqa: BLE001
        return said(error) | {"recognised": is_out_of_memory(error), "torch": isinstance(error, torch.OutOfMemoryError)}
    return {}


def plain_loop() -> dict[str, Any]:
    """A loop that nobody changed, with an evaluation in between."""
    used = overspill.allocator("planned")
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2048, 512, device="cuda")
    planned: list[int] = []
    for turn in range(12):
        before = used.figures()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        planned.append(used.figures().counts.planned - before.counts.planned)
        if turn == 8:
            with torch.no_grad():
                model(torch.randn(3000, 512, device="cuda"))
        overspill.step()
        used.wait()
    beyond = used.figures().reserved / used.figures().requested_peak
    torch.cuda.reset_peak_memory_stats()
    return {
        "planned": planned,
        "allocated": torch.cuda.memory_allocated() == used.figures().allocated == torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.memory_reserved() == used.figures().reserved == stand_in.used_bytes(),
        "summary": "CUDA OOMs: 0" in torch.cuda.memory_summary(),
        "beyond": beyond,
    }


def _loop_on(name: str) -> dict[str, Any]:
    """A loop of changing lengths on the allocator `name`, and what it holds in the end."""
    used = overspill.allocator(name)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    for turn in range(8):
        loss = model(torch.randn(500 + 300 * (turn % 3), 256).cuda()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    del loss
    torch.cuda.empty_cache()
    return {"steps": steps, "reserved": used.figures().reserved, "used": stand_in.used_bytes(), "name": used.name}


def planned() -> dict[str, Any]:
    return _loop_on("planned")


def chunked() -> dict[str, Any]:
    return _loop_on("chunked")


def gtbm() -> dict[str, Any]:
    return _loop_on("gtbm")


def streams() -> dict[str, Any]:
    """A block that another stream uses waits for it; an emptied cache gives all idle pages back."""
    used = overspill.allocator()
    other = torch.cuda.Stream()
    x = torch.empty(4 * MIB, dtype=torch.uint8, device="cuda")
    x.record_stream(other)
    stand_in.hold_events(True)
    del x
    waiting = used.figures().waiting
    torch.cuda.empty_cache()
    return {"waiting": [waiting, used.figures().waiting], "used_bytes": stand_in.used_bytes()}


def _graphs_on(name: str) -> dict[str, Any]:
    """Two graphs in one pool: a step of training, and work of two streams; blocks of each kind are freed in between."""
    used = overspill.allocator(name)
    model = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(256, 256), nn.GELU())]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4096, 256, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    other, beside = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(4):
        step()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    late, shared = torch.empty(9 * MIB, device="cuda"), torch.empty(3 * MIB, device="cuda")
    shared.record_stream(other)
    whole, small = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        step()
        with torch.cuda.stream(beside):  # not captured
            foreign = torch.empty(5 * MIB, device="cuda")
        del late, shared
        waiting = used.figures().waiting
        overspill.step()
    with torch.cuda.graph(small, pool=whole.pool()):
        y = torch.zeros(MIB, device="cuda")
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            z = y + 1
        y.record_stream(other)
        start, stop = y.data_ptr(), y.data_ptr() + y.nbytes
        del y
        torch.cuda.current_stream().wait_stream(other)
    launches = stand_in.counts().launches
    whole.replay()
    small.replay()
    launches = stand_in.counts().launches - launches
    # What the graphs write to is nobody else's, although its blocks were freed.
    taken = [torch.empty(MIB, device="cuda") for _ in range(40)]
    apart = all(t.data_ptr() >= stop or t.data_ptr() + t.nbytes <= start for t in taken)
    held = torch.cuda.memory_reserved() - before > 40 * taken[0].nbytes
    del taken
    step()
    ones = z.numel()
    whole.reset()
    small.reset()
    del whole, small, z, foreign
    torch.cuda.empty_cache()
    return {
        "waiting": waiting, "launches": launches > 20, "apart": apart, "held": held, "ones": ones,
        "left": torch.cuda.memory_reserved() - before, "used": stand_in.used_bytes() == used.figures().reserved,
    }  # fmt: skip


def graphs_on_planned() -> dict[str, Any]:
    return _graphs_on("planned")


def graphs_on_chunked() -> dict[str, Any]:
    return _graphs_on("chunked")


def graphs_on_gtbm() -> dict[str, Any]:
    return _graphs_on("gtbm")


def errors() -> dict[str, Any]:
    """What it says where something cannot be."""
    overspill.allocator()
    torch.zeros(1, device="cuda")
    return {
        "pool": failure(torch.cuda.MemPool),
        "checkpoint": failure(lambda: torch._C._cuda_getCheckpointState(0, torch.cuda.graph_pool_handle())),
        "snapshot": failure(torch.cuda.memory._snapshot),
        "memory": failure(lambda: torch.empty(1 << 41, dtype=torch.uint8, device="cuda")),
        "ones": torch.ones(3, device="cuda").numel(),
    }


def late() -> dict[str, Any]:
    """CUDA is in use already."""
    torch.zeros(1, device="cuda")
    return failure(overspill.allocator)


def beside_train_step() -> dict[str, Any]:
    """A managed step's arena and what is beside it come from the allocator too."""
    used = overspill.allocator()
    step, x = a_step()
    for _ in range(5):
        step(x, x)
    return {
        "offloaded": step.plans[0].offloaded_bytes,
        "allocated": used.figures().allocated,
        "blocks": used.figures().blocks,
    }


if __name__ == "__main__":
    tell(globals()[sys.argv[1]]())
