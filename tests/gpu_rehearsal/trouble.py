"""WHAT: one kind of trouble that a card may make, each in a process of its own; what came of it, as JSON."""

from __future__ import annotations

import gc
import sys
from typing import Any

import stand_in
import torch
from tests.gpu_rehearsal.processes import tell
from torch import nn

import overspill
from overspill.core.errors import StoreError, is_out_of_memory
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

WITHIN: dict[str, Any] = {"budget": "smallest", "policy": "lms"}
"""A plan that swaps, and takes no long search."""


def a_step(device: str = "cuda") -> tuple[Any, torch.Tensor]:
    """A whole step that swaps, and its batch."""
    layers = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(*layers).to(device)
    step = overspill.train_step(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), **WITHIN)
    return step, torch.randn(2048, 512).to(device)


def said(error: BaseException) -> dict[str, Any]:
    """An error's type and first line."""
    return {"error": type(error).__name__, "said": str(error).splitlines()[0][:300]}


def round_trip(device: str) -> bool:
    """Whether real bytes come back from pinned memory as they were."""
    where = torch.device(device)
    engine = make_engine(make_store(None, where), where)
    source = torch.randn(3, 64, 33, 33)
    there = source.to(where)
    handle = engine.offload(there)
    engine.await_offload(handle, there)
    del there
    torch.cuda.synchronize(where)
    back = engine.prefetch(handle)
    engine.await_prefetch(back)
    same = torch.equal(back.cpu(), source)
    engine.close()
    return same


def second_device() -> dict[str, Any]:
    """Both doors on cuda:1; nothing may be taken of cuda:0."""
    step, x = a_step("cuda:1")
    for _ in range(3):
        step(x, x)
    offloaded = [step.plans[0].offloaded_bytes]
    model = nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]).to("cuda:1")
    compiled = overspill.compile(model, **WITHIN)
    for _ in range(3):
        compiled(x).square().mean().backward()
    offloaded.append(compiled.overspill.plans[0].offloaded_bytes)
    return {
        "offloaded_bytes": offloaded,
        "first_device_bytes": stand_in.used_bytes(0),
        "round_trip": round_trip("cuda:1"),
    }


def out_of_memory() -> dict[str, Any]:
    """More than the card has, asked of PyTorch between two managed steps."""
    step, x = a_step()
    step(x, x)
    try:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
    except Exception as error:  # noqa: BLE001
        return said(error) | {"recognised": is_out_of_memory(error), "torch": isinstance(error, torch.OutOfMemoryError)}
    return {}


def refused_registration() -> dict[str, Any]:
    """The driver refuses to lock host memory, once; then the next op and the next step must work."""
    step, x = a_step()
    stand_in.fail("register")
    found: dict[str, Any] = {}
    try:
        step(x, x)
    except StoreError as error:
        found = said(error)
    torch.ones(4, device="cuda").add_(1)
    found["next_step"] = step(x, x).numel() == 1
    return found


def sticky_error() -> dict[str, Any]:
    """A kernel fails in the middle of a step: the error is told, and the process ends."""
    step, x = a_step()
    step(x, x)
    stand_in.fail("launch", 20)
    try:
        step(x, x)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001
        return said(error)
    return {}


def dropped_step() -> dict[str, Any]:
    """A step that is dropped without `close` gives its pinned memory back."""
    pinned = []
    for _ in range(3):
        step, x = a_step()
        step(x, x)
        pinned.append(stand_in.pinned_bytes())
        del step, x
        gc.collect()
    return {"pinned_bytes": pinned, "left_bytes": stand_in.pinned_bytes()}


def exit_with_live_blocks() -> dict[str, Any]:
    """The process ends while a step, its store and its tensors live."""
    step, x = a_step()
    step(x, x)
    keep.extend((step, x))
    return {"live_bytes": torch.cuda.memory_allocated()}


keep: list[Any] = []
TROUBLE = (
    second_device, out_of_memory, refused_registration, sticky_error, dropped_step,
    exit_with_live_blocks,
)  # fmt: skip


if __name__ == "__main__":
    tell({trouble.__name__: trouble for trouble in TROUBLE}[sys.argv[1]]())
