"""`estimate` and `plan` say the same of what a step takes unmanaged, or the plan's page names what makes the difference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import overspill
from overspill.report.plan import unmanaged_notes

DECODER = "decoder:width=256,depth=3,heads=4,vocabulary=8000,seq_len=256"


@pytest.mark.parametrize(
    ("model", "batch", "optimizer", "gpu", "dtype"),
    [
        (
            DECODER,
            16,
            "sgd",
            "rtx4090",
            "amp-bfloat16",
        ),  # attention with dropout, which the CPU computes by other kernels
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
    estimated = overspill.estimate(model, **job).peak_requested_bytes
    plan = overspill.plan(model, **job, budget=1.0)
    assert plan.unmanaged_peak_bytes + plan.library_bytes == pytest.approx(estimated, rel=0.01)  # type: ignore[operator]
    if model == DECODER:
        attention = "efficient" if dtype == "float32" else "flash"
        assert {f"_scaled_dot_product_{attention}_attention", "native_dropout"} <= {op.name for op in plan.graph.ops}


def test_the_page_of_a_plan_names_what_an_estimate_counts_otherwise() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 64, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 32 * 32, 10))

    batch = torch.empty(64, 3, 32, 32), torch.zeros(64, dtype=torch.long)
    plan = overspill.plan(net, batch, nn.CrossEntropyLoss(), device="t4", budget=1.0, torch="2.13")
    notes = dict(unmanaged_notes(plan))
    assert notes["  cuBLAS keeps beside it"] == plan.library_bytes == 2 * 8_519_680
    assert all(nbytes > 0 for nbytes in notes.values())
