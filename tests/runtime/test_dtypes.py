"""Jobs in lower precision and under autocast train as without Overspill, within what was planned."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from overspill.job import Job
from overspill.models import DTYPES, load
from overspill.runtime.options import Options
from overspill.runtime.training import train, train_plain

WAYS = [
    ("gpt2", "amp-bfloat16", False, "eager"),
    ("resnet18", "bfloat16", True, "eager"),
    *(
        pytest.param(model, dtype, whole_step, backend, marks=pytest.mark.long)
        for model in ("gpt2", "resnet18")
        for dtype in DTYPES
        if dtype != "amp"
        for whole_step in (False, True)
        for backend in ("eager", "inductor")
    ),
]


@pytest.mark.short("gpt2-amp-bfloat16-False-eager0")
@pytest.mark.parametrize(("model", "dtype", "whole_step", "backend"), WAYS)
def test_the_numbers_are_those_of_plain_training(model: str, dtype: str, whole_step: bool, backend: str) -> None:
    batch = 32 if (model, dtype) == ("resnet18", "amp-bfloat16") else 4  # there the update is the peak of small batches
    job = Job(partial(load, model, small=True), batch, "momentum", dtype)
    options = Options("90%", store="host", backend=backend, whole_step=whole_step)
    run = train(job, replace(options, partition=None if backend == "eager" else 1), steps=2)
    assert run.identical_to(train_plain(job, Options(backend=backend), steps=2))
    plan = run.plan
    assert plan is not None
    assert run.measured_peak_bytes <= run.planned_peak_bytes <= plan.budget_bytes
    assert whole_step or plan.offloaded_bytes + plan.recomputed_ops > 0
    lower = any(t.dtype == dtype.removeprefix("amp-") for t in plan.graph.tensors if t.kind.value == "activation")
    assert lower or dtype == "float32"
