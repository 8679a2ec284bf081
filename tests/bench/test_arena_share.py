"""What the share of the arena says: no allocator hands out what lies in it, and what library calls allocate cannot."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.capture.programs.allocations import allocations
from overspill.runtime import arena

BENCH = Path(__file__).parents[2] / "bench"


@pytest.fixture
def arena_share(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("arena_share")


def handed_out(call: Any) -> int:
    """Bytes that PyTorch's allocator hands out while `call` runs, which has run before."""
    call()
    with allocations() as found:
        call()
    return sum(change for change in found.changes if change > 0)


def step_bytes(**options: Any) -> int:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 32), nn.GELU(), nn.Linear(32, 1)
    )
    call = overspill.compile(model, budget="1MiB", backend="inductor", store="host", partition=1.0, **options)
    x = torch.randn(4, 3, 8, 8)

    def step() -> None:
        model.zero_grad()
        call(x).sum().backward()

    return handed_out(step)


@pytest.mark.long
def test_what_lies_in_the_arena_is_not_handed_out(arena_share: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[str, str, int]] = []
    places_of = arena.places_of

    def seen(captured: Any, schedule: Any, *given: Any) -> Any:
        places = places_of(captured, schedule, *given)
        found[:] = arena_share.allocated(captured, schedule, places)
        return places

    monkeypatch.setattr(arena, "places_of", seen)
    fewer = step_bytes() - step_bytes(placement="planned")
    assert fewer == sum(nbytes for where, _, nbytes in found if where == arena_share.ARENA) > 0
    assert {op for where, op, _ in found if where == arena_share.LIBRARY} == {"extern_kernels.convolution"}
    torch._dynamo.reset()


def test_a_convolution_into_given_memory_allocates_its_results_all_the_same() -> None:
    aten = torch.ops.aten
    x, weight, output = torch.randn(2, 4, 8, 8), torch.randn(6, 4, 3, 3), torch.randn(2, 6, 8, 8)
    how = ((1, 1), (1, 1), (1, 1), False, (0, 0), 1)
    into = torch.empty_like(output)
    forward = (x, weight, None, *how)
    assert handed_out(lambda: aten.convolution.out(*forward, out=into)) == handed_out(
        lambda: aten.convolution(*forward)
    )
    backward = (output, x, weight, [6], *how, [True, True, True])
    outs = {"out0": torch.empty_like(x), "out1": torch.empty_like(weight), "out2": torch.empty(6)}
    assert handed_out(lambda: aten.convolution_backward.out(*backward, **outs)) == handed_out(
        lambda: aten.convolution_backward(*backward)
    )
