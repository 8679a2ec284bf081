"""`estimate`, `plan` and `compare` say the same of what a step takes unmanaged."""

from __future__ import annotations

from typing import Any

import pytest

import overspill

SHALLOW = "decoder:width=256,depth=1,heads=4,vocabulary=8000,seq_len=256"
DECODER = SHALLOW.replace("depth=1", "depth=3")
SMALL = "decoder:width=64,depth=1,heads=4,vocabulary=64,seq_len=64"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "batch", "optimizer", "gpu", "dtype"),
    [
        # Attention with dropout, which the CPU computes by other kernels.
        (SHALLOW, 16, "sgd", "rtx4090", "amp-bfloat16"),
        # The update, which CUDA makes for all parameters together.
        pytest.param(DECODER, 1, "adamw", "h100", "float32", marks=pytest.mark.long),
        pytest.param("gpt2", 8, "sgd", "rtx4090", "float32", marks=pytest.mark.long),
        pytest.param("resnet50", 32, "sgd", "rtx4090", "float32", marks=pytest.mark.long),
        pytest.param("vgg16", 16, "sgd", "rtx4090", "float32", marks=pytest.mark.long),
        pytest.param(DECODER, 16, "sgd", "rtx4090", "float32", marks=pytest.mark.long),
        pytest.param("resnet50", 32, "adamw", "a100-40gb", "bfloat16", marks=pytest.mark.long),
        pytest.param("unet", 4, "momentum", "rtx4090", "amp-bfloat16", marks=pytest.mark.long),
        pytest.param("lstm", 16, "adamw", "t4", "float32", marks=pytest.mark.long),
        pytest.param("decoder:width=2048,depth=24,heads=16", 1, "sgd", "rtx4090", "float32", marks=pytest.mark.long),
    ],
)
def test_what_a_job_takes_unmanaged_is_one_number(model: str, batch: int, optimizer: str, gpu: str, dtype: str) -> None:
    job: dict[str, Any] = {"optimizer": optimizer, "batch": batch, "device": gpu, "dtype": dtype}
    estimate = overspill.estimate(model, **job)
    plan = overspill.plan(model, **job)
    assert estimate.total_bytes == plan.unmanaged_bytes == plan.unmanaged_device_bytes
    assert plan.device_bytes is not None
    assert plan.reserved_bytes is not None
    assert plan.device_bytes - plan.reserved_bytes == estimate.outside_bytes
    # The captured graph, whose slowdowns are told, is of the same step.
    assert plan.unmanaged_peak_bytes + plan.library_bytes == pytest.approx(estimate.peak_requested_bytes, rel=0.01)  # type: ignore[operator]
    if model in {DECODER, SHALLOW}:
        attention = "efficient" if dtype == "float32" else "flash"
        assert {f"_scaled_dot_product_{attention}_attention", "native_dropout"} <= {op.name for op in plan.graph.ops}


@pytest.mark.parametrize(
    "how",
    [{}]
    + [
        pytest.param(how, marks=pytest.mark.long)
        for how in ({"lora": 4, "checkpointing": True}, {"accumulate": 2}, {"attention": "math"})
    ],
)
def test_every_command_says_the_same_of_the_unmanaged_step(how: dict[str, Any]) -> None:
    job: dict[str, Any] = {"optimizer": "adamw", "batch": 4, "device": "t4", **how}
    taken = overspill.estimate(SMALL, **job).total_bytes
    assert overspill.plan(SMALL, **job).unmanaged_bytes == taken
    assert overspill.plan(SMALL, **job, whole_step=True).unmanaged_bytes == taken
    assert overspill.compare(SMALL, **job, policies=("liveness",)).unmanaged_bytes == taken
