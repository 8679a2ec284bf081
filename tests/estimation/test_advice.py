"""Advice: every change is tried, none makes it worse, the cheapest come first, and several together where one is too few."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import islice

import pytest
import torch
from torch import nn

from overspill.core import Device
from overspill.costs.context import OTHERS
from overspill.devices import load_device
from overspill.estimation.advice import CALLBACK, Advice, Price, advice
from overspill.estimation.api import estimate
from overspill.estimation.estimate import Estimate
from overspill.job import Parallel
from overspill.plans.fit import GAIN, NEAR
from overspill.report.advice import advise_page, ranked, sized
from overspill.runtime.advise import advise

MIB = 1 << 20
WIDE = 4096
LARGE, FEW = 16384, 16  # samples of which feature maps are the peak, and so few that the update is


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDE, 4 * WIDE), nn.Linear(4 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def tower(blocks: int = 2) -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(blocks)])


def mean(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def gpu(mebibytes: int) -> Device:
    return replace(
        load_device("rtx3060"), name="small", memory_bytes=mebibytes * MIB, context_bytes=MIB, context_low_bytes=0,
        context_high_bytes=2 * MIB,
    )  # fmt: skip


def job(
    mebibytes: int, batch: int = LARGE, optimizer: str | None = "adamw", blocks: int = 2, **how: object
) -> Estimate:
    build = partial(tower, blocks)
    return estimate(build, torch.empty(batch, WIDE, device="meta"), mean, optimizer, device=gpu(mebibytes), **how)  # type: ignore[arg-type]


@cache
def found(mebibytes: int, batch: int = LARGE) -> tuple[Estimate, list[Advice]]:
    made = job(mebibytes, batch)
    return made, list(advice(made))


def told(all_of_it: list[Advice], part: str) -> Advice:
    return next(one for one in all_of_it if part in one.what)


def test_each_change_was_tried_and_none_makes_it_worse() -> None:
    made, all_of_it = found(6000)
    assert not made.fits()
    tried = [one for one in all_of_it if one.minimum_capacity_bytes is not None]
    assert len(tried) >= 5
    for one in tried:
        assert one.cost
        if "another GPU" not in one.what:
            assert one.minimum_capacity_bytes < made.minimum_capacity_bytes  # type: ignore[operator]
            assert one.fits == (one.minimum_capacity_bytes <= made.device.memory_bytes)  # type: ignore[operator]


def test_the_cheapest_come_first() -> None:
    _, all_of_it = found(6000)
    alone = [one.price for one in all_of_it if not one.what.startswith("together")]
    assert alone == sorted(alone)
    assert alone[0] is Price.NOTHING
    assert alone[-1] is Price.HARDWARE


def test_what_is_advised_is_what_an_estimate_of_it_says() -> None:
    _, all_of_it = found(6000)
    checkpointed = job(6000, checkpointing=True)
    assert told(all_of_it, "checkpointing").minimum_capacity_bytes == checkpointed.minimum_capacity_bytes
    half = job(6000, dtype="amp-bfloat16")
    assert told(all_of_it, "autocast").total_bytes == half.total_bytes


@pytest.mark.long
def test_the_fused_optimizer_has_no_temporaries_and_costs_nothing() -> None:
    made = job(5000, FEW)  # so few samples that the update is the peak
    first = made.changes[0]
    assert "AdamW(…, fused=True)" in first.what
    assert (first.price, first.fits) == (Price.NOTHING, True)

    def fused(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3, fused=True)  # type: ignore[arg-type]

    by_hand = estimate(tower, torch.empty(FEW, WIDE, device="meta"), mean, fused, device=made.device)
    assert first.minimum_capacity_bytes == by_hand.minimum_capacity_bytes
    assert "fused" not in " ".join(one.what for one in by_hand.changes)


def test_micro_batches_are_tried_with_the_gradients_that_they_add_to() -> None:
    _, all_of_it = found(6000)
    one = told(all_of_it, "accumulating")
    micro = int(one.what.split()[1])
    assert one.fits
    assert one.minimum_capacity_bytes == job(6000, micro, accumulate=2).minimum_capacity_bytes


@pytest.mark.long
def test_where_no_change_does_it_alone_several_do_together() -> None:
    made, all_of_it = found(4000, 8192)
    kept = [one for one in all_of_it if one.price < Price.RESULTS]
    assert not any(one.fits for one in kept if not one.what.startswith("together"))
    together = told(all_of_it, "together")
    assert together.fits
    assert together.what.count(";") >= 1
    assert together.minimum_capacity_bytes <= made.device.memory_bytes  # type: ignore[operator]


@pytest.mark.long
def test_what_cannot_help_by_itself_is_not_tried() -> None:
    made, all_of_it = found(3000, 4096)
    assert made.peak.by_category["weights"] + made.peak.by_category["optimizer_state"] > made.device.memory_bytes
    assert not any("autocast" in one.what or one.what.startswith("activation") for one in all_of_it)


@pytest.mark.long
def test_more_gpus_are_the_fewest_that_do() -> None:
    # Weights and gradients take 6 GiB, so that updates on the host are not enough.
    made = job(5500, 64, blocks=6)
    shared = next(one for one in advice(made) if one.gpus > 1 and "another" not in one.what)
    assert shared.fits
    assert "FSDP" in shared.what
    assert f"over {shared.gpus} GPUs" in shared.what
    half = shared.gpus // 2
    assert half > 1
    assert not job(5500, 64 // half, blocks=6, parallel=Parallel("fsdp", half)).fits()


def test_where_it_fits_only_what_costs_nothing_much_is_told() -> None:
    made, all_of_it = found(16000, FEW)
    assert made.fits()
    assert all_of_it
    assert all(one.price <= Price.TIME and one.fits for one in all_of_it)
    assert made.changes == ()


def test_gradients_that_are_zeroed_may_be_given_back() -> None:
    kept = job(6000, set_to_none=False)
    assert "set_to_none=True" in " ".join(one.what for one in islice(advice(kept), 2))


def test_without_an_optimizer_there_is_nothing_to_checkpoint() -> None:
    made = job(900, optimizer=None)
    words = " ".join(one.what for one in advice(made))
    assert not made.fits()
    assert "checkpointing" not in words
    assert "accumulating" not in words


def test_frozen_weights_beside_adapters_can_have_few_bits() -> None:
    made = job(500, FEW, lora=8)
    assert not made.fits()
    words = " ".join(one.what for one in advice(made, quick=True))
    assert "QLoRA: adapters of rank 8" in words
    assert "LoRA: adapters of rank 8 alone" not in words


@pytest.mark.long
def test_no_other_update_is_tried_beside_adapters_whose_state_is_little() -> None:
    tried: list[str] = []
    vain: dict[str, str] = {}
    list(advice(job(3000, 16384, lora=1), progress=tried.append, vain=vain.setdefault, quick=True))
    updates = [what for what in vain if "fused" in what or "8bit" in what or "optimizer state" in what]
    assert len(updates) == 3
    assert {vain[what] for what in updates} == {"saves less than one percent"}
    assert not any(what in line for what in updates for line in tried)


@pytest.mark.long
def test_a_sharded_job_has_a_plan_of_ours_among_its_advice() -> None:
    made = job(3000, 4096, parallel=Parallel("fsdp", 2))
    ours = next(one for one in advise(made) if "fully_shard" in one.what)
    assert ours.fits
    assert ours.step_seconds
    assert not any("fully_shard" in one.what or "overspill.compile" in one.what for one in advice(made, quick=True))


@pytest.mark.long
def test_the_whole_step_is_planned_too_where_calls_alone_cost_time() -> None:
    made = job(2600, FEW)  # less than the weights, whose update is the peak
    calls, whole = (one for one in advise(made) if "overspill." in one.what)
    assert calls.trainer == CALLBACK
    assert calls.before == 'overspill.allocator("planned")'
    assert whole.python.startswith("step = overspill.train_step(")
    assert whole.fits
    assert whole.slowdown * GAIN < calls.slowdown  # type: ignore[operator]
    for ours in (calls, whole):
        named = sized(ours)
        assert f'budget="{ours.budget_bytes >> 20}MiB"' in named.python  # type: ignore[operator]
        assert ours.minimum_capacity_bytes <= ours.budget_bytes  # type: ignore[operator]
        assert ours.budget_bytes == made.budget_bytes <= (1 - OTHERS) * made.device.memory_bytes


@pytest.mark.long
def test_a_plan_is_compared_with_a_step_that_updates_as_it_does() -> None:
    made = job(5000, FEW)
    ours = next(one for one in advise(made) if "overspill.compile" in one.what)  # the update in parts is all
    assert ours.fits
    assert ours.slowdown < NEAR  # type: ignore[operator]
    assert ours.step_seconds == ours.slowdown * made.step_seconds()  # type: ignore[operator]


def test_every_row_has_a_simulated_step_or_says_why_not() -> None:
    made, all_of_it = found(6000)
    assert all((one.step_seconds is None) == bool(one.unsimulated) for one in all_of_it)
    usual = made.step_seconds()
    assert usual is not None
    assert told(all_of_it, "accumulating").step_seconds == pytest.approx(usual, rel=0.05)
    assert usual < told(all_of_it, "checkpointing").step_seconds < 1.5 * usual  # type: ignore[operator]
    assert told(all_of_it, "autocast").step_seconds < usual  # type: ignore[operator]
    assert "on the host" in told(all_of_it, "update on the host").unsimulated


@pytest.mark.long
def test_updates_on_the_host_are_tried_where_the_step_costs_time() -> None:
    device = replace(gpu(2600), host_update_bytes_per_second=100e9)
    made = estimate(tower, torch.empty(FEW, WIDE, device="meta"), mean, "adamw", device=device)
    *_, whole, on_host = (one for one in advise(made) if "overspill." in one.what)
    assert "update=" not in whole.what
    assert on_host.slowdown * GAIN < whole.slowdown  # type: ignore[operator]
    named = sized(on_host).python
    assert f'update="auto", budget="{on_host.budget_bytes >> 20}MiB"' in named  # type: ignore[operator]


def test_changes_carry_the_arguments_of_trainer() -> None:
    _, all_of_it = found(6000)
    assert told(all_of_it, "checkpointing").trainer == "gradient_checkpointing=True"
    assert told(all_of_it, "autocast").trainer == "bf16=True"
    one = told(all_of_it, "accumulating")
    assert one.trainer.startswith(f"per_device_train_batch_size={one.what.split()[1]}, gradient_acc")
    assert told(all_of_it, "8bit").trainer == 'optim="adamw_bnb_8bit"'
    assert not told(all_of_it, "another GPU").trainer


def test_a_reader_sees_what_fits_first_and_what_is_not_enough_alone_below() -> None:
    made, all_of_it = found(6000)
    shown, too_little = ranked(all_of_it)
    assert {one.what for one in all_of_it if one.fits is False} & {one.what for one in shown} == set()
    assert told(all_of_it, "autocast").what in too_little
    order = [(not one.fits, one.price, one.step_seconds or float("inf")) for one in shown]
    assert order == sorted(order)
    assert shown[0].fits
    assert [one.fits for one in shown][-1] is None  # as Overspill's own plan, which is not made here
    row = next(line for line in made.explain().splitlines() if line.startswith("overspill.compile"))
    assert " perhaps " in row
    assert row.count("GiB") + row.count("MiB") >= 2  # its budget
    none = [one for one in all_of_it if one.fits is False]
    assert [one.what for one in ranked(none)[0]] == [one.what for one in none]


def test_what_to_do_next_says_where_each_line_goes() -> None:
    made, all_of_it = found(6000)
    ours = replace(told(all_of_it, "overspill."), fits=True, before='overspill.allocator("planned")')
    first = replace(told(all_of_it, "autocast"), fits=True)
    lines = [(line.text, line.why) for line in advise_page(made, "", [first, ours], {}).next]
    size = made.budget_bytes >> 20
    assert lines == [
        ("bf16=True", "mixed precision: torch.autocast in bfloat16, in Trainer:"),
        ('overspill.allocator("planned")', "Or Overspill's plan. First of all, before CUDA is used:"),
        (f'model = overspill.compile(model, budget="{size}MiB")', "Then, before your training loop:"),
        (f'callbacks=[overspill.callbacks.Budget("{size}MiB")]', "The same in Trainer or TRL:"),
    ]


def test_estimates_show_the_first_five() -> None:
    made, all_of_it = found(6000)
    assert list(made.changes) == all_of_it[:5]
    assert "What would help: what fits, by cost, then what may" in made.explain()
    assert f'budget="{made.budget_bytes >> 20}MiB"' in made.explain()
    assert f"with memory to spare it takes {made.total_bytes}" not in made.explain()


@pytest.mark.long
def test_a_decoder_of_1_3_billion_parameters_is_told_of_the_fused_optimizer() -> None:
    made = estimate("decoder:width=2048,depth=24,heads=16", optimizer="adamw", batch=1, device="rtx3090")
    first = made.changes[0]
    assert "AdamW(…, fused=True)" in " ".join(one.what for one in made.changes[:2])
    assert first.price is Price.NOTHING
