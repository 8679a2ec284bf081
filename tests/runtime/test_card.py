"""A budget in bytes on a card, by both doors: no GPU is used here. What a run really allocates on the CPU is replayed on
PyTorch's caching allocator, on a card of exactly the budget's size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.capture.programs.allocations import allocations
from overspill.core import Device
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.devices import load_device
from overspill.job import Job
from overspill.models import load
from overspill.placement.allocators.caching_config import CachingConfig
from overspill.placement.card import Card
from overspill.placement.events import ALLOCATE, FREE, Events
from overspill.placement.replay import replay
from overspill.plans.plan import make_plan
from overspill.runtime import hardware, reserved
from overspill.runtime.options import Options
from overspill.runtime.reserved import ReservedWatch
from overspill.runtime.training import train

MIB = 1 << 20
CARD_BYTES, CARD_OF = hardware.card_bytes, hardware.card_of
GPU = replace(load_device("t4"), index=0, context_bytes=100 * MIB)
"""A device that plans take for one of this machine's."""
CARD = Card(GPU)
DECODER = "decoder:width=128,depth=4,heads=4,vocabulary=4096,seq_len=64"


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card with 100 MiB of context."""
    monkeypatch.setattr(hardware, "card_of", lambda device, *_: Card(device))
    monkeypatch.setattr(hardware, "card_bytes", lambda device: device.memory_bytes)


def allocated(run: Callable[[], Any]) -> Events:
    """What `run` asks of PyTorch's CPU allocator, in order."""
    with allocations() as found:
        run()
    rows = [
        (ALLOCATE, block, nbytes, 0) if nbytes > 0 else (FREE, block, 0, 0)
        for block, nbytes in zip(found.blocks, found.changes, strict=True)
    ]
    return Events.from_rows(rows)


def budget_of(job: Job, share: float, *, whole_step: bool) -> int:
    """A share of what the job takes of the card unmanaged, and the context."""
    plan = train(job, Options(device=GPU, store="host", whole_step=whole_step), steps=1).plan
    assert plan is not None
    assert plan.reserved_bytes is not None
    return CARD.context_bytes + int(share * plan.reserved_bytes)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "batch", "whole_step", "share"),
    # No convolutions: inside one op those of the CPU take and give back more than any plan knows of.
    [(DECODER, 4, False, 0.97), (DECODER, 16, False, 0.75), (DECODER, 16, True, 0.75)],
)
def test_what_a_run_allocates_survives_on_a_card_of_exactly_the_budget(
    model: str, batch: int, whole_step: bool, share: float, tmp_path: Any
) -> None:
    job = Job(lambda: load(model), batch, "adamw")
    budget = budget_of(job, share, whole_step=whole_step)
    found = []
    asked = Options(device=GPU, budget=budget, store="disk", store_dir=tmp_path, whole_step=whole_step)
    events = allocated(lambda: found.append(train(job, asked, keep_state=False)))
    (run,) = found
    assert run.plan is not None
    assert run.plan.asked_bytes == budget
    assert run.planned_device_bytes is not None
    assert run.planned_reserved_bytes is not None
    assert run.planned_peak_bytes < run.planned_reserved_bytes == run.planned_device_bytes - CARD.context_bytes
    assert run.planned_device_bytes <= budget
    assert run.plan.offloaded_bytes or run.plan.recomputed_ops
    done = replay(events, "pytorch", capacity_bytes=budget - CARD.context_bytes)
    assert done.fits
    assert not done.retries
    assert done.peak_reserved_bytes > 0.8 * run.planned_reserved_bytes


def deep_step(budget: str) -> overspill.runtime.step.train_step.TrainStep:
    """Three hidden layers, whose feature maps are most of what a step takes."""
    torch.manual_seed(0)
    sizes = [64, 512, 512, 512, 64]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    return overspill.train_step(
        model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), budget=budget, device=GPU, store="host"
    )


@pytest.mark.long
def test_with_the_live_allocator_a_run_survives_on_its_card_from_the_first_step_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The allocator's own code, on a card of exactly the budget, gets what ten steps ask for."""
    monkeypatch.setattr(hardware.allocator, "in_force", lambda: "planned")
    ended = []
    monkeypatch.setattr(hardware.allocator, "step", lambda: ended.append(True))
    step = deep_step("136MiB")
    batch = torch.randn(4096, 64), torch.randn(4096, 64)
    events = allocated(lambda: [step(*batch) for _ in range(10)])
    assert len(ended) == 10
    (plan,) = step.plans
    assert plan.pool == "planned"
    assert plan.places is None
    assert plan.offloaded_bytes or plan.recomputed_ops
    room = plan.asked_bytes - CARD.context_bytes
    done = replay(events, "planned", capacity_bytes=room)
    assert done.fits
    assert done.peak_requested_bytes > 0.6 * room  # the CPU has no library workspaces
    step.close()


def test_a_share_is_of_the_card_that_the_step_needs_unmanaged() -> None:
    step = deep_step("90%")
    step(torch.randn(4096, 64), torch.randn(4096, 64))
    (plan,) = step.plans
    whole = make_plan(plan.graph, plan.device, "liveness", 1 << 40)
    assert plan.unmanaged_device_bytes == CARD.measured(whole).device_bytes
    assert plan.asked_bytes == plan.device_budget_bytes == int(0.9 * plan.unmanaged_bytes)
    assert plan.offloaded_bytes or plan.recomputed_ops
    assert step.reserved_bytes == plan.reserved_bytes
    assert step.device_bytes == CARD.context_bytes + (step.reserved_bytes or 0) <= plan.asked_bytes
    assert plan.most_live_bytes == plan.asked_bytes - CARD.context_bytes
    step.close()


def test_a_share_of_a_card_that_is_here_is_no_more_than_it_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    step = deep_step("100%")
    monkeypatch.setattr(hardware, "card_bytes", lambda _: 150 * MIB)
    step(torch.randn(4096, 64), torch.randn(4096, 64))
    (plan,) = step.plans
    assert plan.asked_bytes == 150 * MIB < plan.unmanaged_bytes
    step.close()


@pytest.mark.long
def test_the_smallest_budget_is_the_smallest_card() -> None:
    step = deep_step("smallest")
    batch = torch.randn(4096, 64), torch.randn(4096, 64)
    step(*batch)
    (plan,) = step.plans
    assert step.device_bytes == plan.asked_bytes == step.smallest_budget(*batch)
    with pytest.raises(InfeasibleBudgetError):
        deep_step(str(plan.asked_bytes - 1))(*batch)
    step.close()


@pytest.mark.long
@pytest.mark.parametrize("budget", ["95%", pytest.param("smallest", marks=pytest.mark.long)])
def test_calls_that_wait_for_their_backward_at_once_share_a_card(budget: str) -> None:
    """A model that is called twice before its backward, within a share of the card that both calls need."""
    torch.manual_seed(0)
    tower = nn.Sequential(
        nn.Linear(64, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 64),
    )
    model = overspill.compile(tower, budget=budget, device=GPU, store="host")
    one, other = torch.randn(2, 8192, 64)
    with warnings.catch_warnings(action="ignore"):  # that the first plans did not know of two calls
        for _ in range(2):
            (model(one) - model(other)).square().mean().backward()
            tower.zero_grad()
    (plan,) = model.overspill.plans
    assert plan.needed_bytes <= plan.asked_bytes < plan.unmanaged_bytes
    if budget == "95%":
        assert plan.asked_bytes == int(0.95 * plan.unmanaged_bytes)


def test_a_card_that_is_too_small_is_refused_with_one_that_works() -> None:
    def made(budget: int) -> overspill.runtime.step.train_step.TrainStep:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64))
        return overspill.train_step(
            model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), budget=budget, device=GPU, store="host"
        )

    batch = torch.randn(4096, 64), torch.randn(4096, 64)
    with pytest.raises(InfeasibleBudgetError, match=r"101\.0 MiB") as error:
        made(101 * MIB)(*batch)
    assert made(101 * MIB).smallest_budget(*batch) == error.value.floor_bytes
    step = made(error.value.floor_bytes)
    step(*batch)
    assert step.device_bytes == error.value.floor_bytes
    step.close()


def test_a_named_placement_and_a_device_that_is_not_there_count_as_before() -> None:
    for asked in (Options(budget=1 << 30, device=GPU, placement="best-fit"), Options(budget=1 << 30, device="t4")):
        cpu = torch.device("cpu")
        assert not hardware.account_of(asked, hardware.device_named(asked.device, cpu), cpu).is_card


# -- what the card is, with a stand-in for torch.cuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The figures of a card that `torch.cuda` speaks of: bytes in all, used by anyone, reserved by this process."""
    figures = {"total": 16 << 30, "used": 320 * MIB, "reserved": 200 * MIB}

    class Properties:
        name, total_memory, is_integrated = "Tesla T4", figures["total"], 0

    fakes = {
        "get_device_name": lambda _: "Tesla T4",
        "get_device_properties": lambda _: Properties,
        "get_device_capability": lambda _: (7, 5),
        "current_device": lambda: 0,
        "mem_get_info": lambda _: (figures["total"] - figures["used"], figures["total"]),
        "memory_reserved": lambda _: figures["reserved"],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(hardware, "_CONTEXTS", {})
    return figures


def noun() -> Device:
    return hardware.device_noun(torch.device("cuda", 1))


def test_the_context_is_what_is_used_and_not_reserved_and_the_kernels_to_come(cuda: dict[str, int]) -> None:
    device = noun()
    assert device.index == 1
    assert device.compute_capability == "7.5"
    kernels = device.context_bytes - 120 * MIB
    assert 0 < kernels < 100 * MIB
    assert CARD_BYTES(device) == cuda["total"]


def test_other_processes_are_no_context_and_what_they_take_is_not_given(cuda: dict[str, int]) -> None:
    cuda["used"] = 8 << 30
    device = noun()
    assert device.context_bytes < 1 << 30
    free = cuda["total"] - cuda["used"]
    assert CARD_BYTES(device) - device.context_bytes <= free + cuda["reserved"]


def test_the_whole_card_is_no_more_than_it_can_give(cuda: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "card_bytes", CARD_BYTES)
    cuda["used"] = 8 << 30
    device = noun()
    where = torch.device("cuda", 1)
    most = CARD_BYTES(device)
    for budget, given in ((None, most), ("15GiB", most), ("2GiB", 2 << 30)):
        asked = Options(budget=budget)
        assert hardware.account_of(asked, device, where).fixed(asked.limit) == given


def test_the_allocator_is_as_the_environment_says(cuda: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert CARD_OF(noun()).config == CachingConfig(expandable_segments=True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    with pytest.raises(UnsupportedError, match="backend:cudaMallocAsync"):
        CARD_OF(noun())
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "nonsense")
    with pytest.raises(RequestError, match="nonsense"):
        CARD_OF(noun())


def test_the_handle_of_cublas_is_counted(cuda: dict[str, int]) -> None:
    card = CARD_OF(noun())
    assert card.handle_bytes[0] == 8519680
    assert card.context_bytes == noun().context_bytes


# -- what is reserved while plans are in force


def test_more_than_was_planned_is_said_once_with_both_figures(
    cuda: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    watch, where = ReservedWatch(), torch.device("cuda", 1)
    watch.look(lambda: None, where)  # a plan that is not for a card
    watch.look(lambda: cuda["reserved"], where)
    assert not [r for r in caplog.records if r.name == "overspill"]
    cuda["reserved"] += 3 * MIB
    for _ in range(8):
        watch.look(lambda: 200 * MIB, where)
    (record,) = (r for r in caplog.records if r.name == "overspill")
    assert record.levelname == "WARNING"
    assert "has taken 203.0 MiB of cuda:1, more than the 200.0 MiB" in record.getMessage()


def test_what_is_reserved_is_asked_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(reserved, "held_bytes", lambda _: asked.append(step) or 0)
    watch = ReservedWatch()
    for step in range(1, 101):  # noqa: B007 - read above
        watch.look(lambda: 0, torch.device("cuda"))
    assert asked == [1, 2, 4, 8, 16, 32, 64]
    ReservedWatch().look(lambda: 0, torch.device("cpu"))
    assert len(asked) == 7


@pytest.mark.parametrize("whole_step", [pytest.param(False, marks=pytest.mark.long), True])
def test_both_doors_look_at_what_is_reserved(whole_step: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int | None] = []
    monkeypatch.setattr(ReservedWatch, "look", lambda _, planned, where: looks.append(planned()))
    job = Job(lambda: load(DECODER), 2)
    run = train(job, Options(device=GPU, store="host", whole_step=whole_step), steps=2)
    assert set(looks) == {run.planned_reserved_bytes}
    assert len(looks) == (2 if whole_step else 4)  # of a compiled model before each forward and backward
