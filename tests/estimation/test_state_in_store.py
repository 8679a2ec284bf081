"""What an estimate says of device, host memory and disk, against the plan of the same job."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from overspill.devices import load_device
from overspill.estimation.api import Setting, of_job
from overspill.estimation.state_in_store import DiskShare, state_in_store
from overspill.job import job_of
from overspill.plans.plan import make_plan
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of

WIDTH, LAYERS = 256, 24
MIB = 1 << 20


@pytest.mark.short("half")
@pytest.mark.parametrize(
    ("frozen", "host", "live"), [(0, 8 * MIB, 8 * MIB), (12, 4 * MIB, 4 * MIB)], ids=["none", "half"]
)
def test_each_place_takes_about_what_the_plan_says(frozen: int, host: int, live: int) -> None:
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)]
    for layer in layers[:frozen]:
        layer.requires_grad_(requires_grad=False)
    model = nn.Sequential(*(one for layer in layers for one in (layer, nn.Tanh())))
    job = job_of(model, torch.randn(4, WIDTH), lambda model, x: model(x).square().mean(), None, "adamw")
    gpu = replace(
        load_device("rtx4090"), host_bytes=host, disk_read_bytes_per_second=6e9, disk_write_bytes_per_second=3e9
    )
    made = of_job(job, Setting.of(gpu))
    # Live bytes of a plan are without what libraries hold.
    held = int(made.demand.nbytes[made.demand.scratch].sum())
    found = state_in_store(made, replace(gpu, memory_bytes=made.outside_bytes + held + live), fills=True)
    weight = 4 * WIDTH * WIDTH
    assert found.gradient_bytes == (LAYERS - frozen) * weight
    assert found.state_bytes == pytest.approx((4 * LAYERS - 3 * frozen) * weight, rel=1e-3)
    assert found.state_bytes == found.kept_bytes + found.host_bytes + found.loop.staying_bytes
    plan = make_plan(step_of(job, Options(device=gpu, whole_step=True), moves=True).graph, gpu, "auto", live)
    assert plan.tiers is not None
    assert plan.tiers.host_peak_bytes == found.host_bytes == host
    # Small tensors take turns there, which moves more.
    assert 0.4 * plan.tiers.disk_bytes < found.whole_step.staying_bytes < plan.tiers.disk_bytes


@pytest.mark.short("on the host")
@pytest.mark.parametrize("of", ["loop", "whole_step", "on the host"])
def test_no_plan_takes_less_of_the_disk_though_activations_leave(of: str) -> None:
    model = nn.Sequential(*(one for _ in range(LAYERS) for one in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())))
    model[0].requires_grad_(requires_grad=False)
    job = job_of(model, torch.randn(512, WIDTH), lambda model, x: model(x).square().mean(), None, "adamw-fused")
    gpu = replace(
        load_device("rtx4090"), host_bytes=6 * MIB, disk_read_bytes_per_second=6e9, disk_write_bytes_per_second=3e9,
        host_update_bytes_per_second=1e10,
    )  # fmt: skip
    made, live = of_job(job, Setting.of(gpu)), 6 * MIB
    found = state_in_store(made, replace(gpu, memory_bytes=made.context.low + live), fills=True)
    least = found.loop if of == "loop" else found.whole_step
    *_, captured = step_of(job, Options(device=gpu, whole_step=of != "loop"), moves=True).captures
    plan = make_plan(captured.graph, gpu, "auto:update=host" if of == "on the host" else "auto", live)
    assert plan.tiers is not None
    assert plan.tiers.fits
    assert 0 < least.disk_bytes <= min(plan.tiers.disk_bytes, least.staying_bytes)
    assert 0 < least.written_bytes <= plan.disk_written_bytes
    assert 0 < least.seconds <= plan.timeline.disk_seconds


def test_without_a_disk_all_state_is_in_host_memory() -> None:
    job = job_of(nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH), lambda model, x: model(x).mean(), None, "sgd")
    made = of_job(job, Setting.of("rtx4090"))
    found = state_in_store(made, made.device, fills=False)
    assert found.host_bytes == found.state_bytes > found.gradient_bytes
    assert found.loop == found.whole_step == DiskShare(0, 0, 0, 0.0)
    assert not found.is_bounded
    assert made.outside_bytes < found.least_device_bytes <= found.device_bytes <= made.total_bytes
    assert state_in_store(made, made.device, fills=True).kept_bytes == found.state_bytes
