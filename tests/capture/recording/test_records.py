"""Recordings repeat exactly, and many of them leave nothing in memory."""

from __future__ import annotations

import gc
import random
import time
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from overspill.capture.fake_cuda import fake
from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.estimation.programs import program_of
from overspill.job import Job
from overspill.models import load


def job(model: str = "resnet18", dtype: str = "float32", batch: int = 2) -> Any:
    return program_of(Job(lambda: load(model, small=True), batch, "adamw", dtype))


@pytest.mark.parametrize(
    "dtype", ["amp", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float32", "bfloat16"))]
)
@pytest.mark.parametrize("model", [pytest.param("resnet18", marks=pytest.mark.long), "gpt2"])
def test_two_recordings_of_one_program_are_equal(model: str, dtype: str) -> None:
    assert record(job(model, dtype)) == record(job(model, dtype))


def test_what_ran_before_does_not_show() -> None:
    alone = record(job("gpt2"))
    for other in (job("unet"), job("gpt2", batch=3), job("gpt2", "amp")):
        record(other)
    torch.manual_seed(random.randrange(1000))
    assert record(job("gpt2")) == alone


@pytest.mark.long
def test_the_collectors_moment_does_not_show() -> None:
    plain = record(job())
    gc.disable()
    try:
        assert record(job()) == plain
    finally:
        gc.enable()
    threshold = gc.get_threshold()
    gc.set_threshold(5)
    try:
        assert record(job()) == plain
    finally:
        gc.set_threshold(*threshold)


def test_a_recording_is_saved_and_read_back(tmp_path: Any) -> None:
    recording = record(job())
    recording.save(tmp_path / "recording.json")
    assert Recording.load(tmp_path / "recording.json") == recording


def test_nothing_outlives_its_recording() -> None:
    kept: list[weakref.ref[Any]] = []

    def program(recorder: Recorder) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.LSTM(8, 8)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        with torch.autocast("cuda"):
            loss = model(torch.randn(4, 8, device="cuda"))[0].sum()
        loss.backward()
        optimizer.step()
        kept.extend(weakref.ref(thing) for thing in (recorder, model, optimizer, model[0].weight, loss))

    record(program)
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)


@pytest.mark.parametrize("error", [ValueError, UnsupportedError])
def test_nothing_outlives_a_program_that_fails(error: type[Exception]) -> None:
    kept: list[weakref.ref[Any]] = []

    def program(recorder: Recorder) -> None:
        model = nn.Linear(8, 8).cuda()
        kept.extend([weakref.ref(recorder), weakref.ref(model)])
        raise error("no")

    with pytest.raises((RequestError, UnsupportedError)):
        record(program)
    gc.collect()
    assert [reference() for reference in kept] == [None, None]


@pytest.mark.long
def test_many_recordings_do_not_add_up() -> None:
    record(job())
    gc.collect()
    before, remembered = len(gc.get_objects()), len(fake._MEMORY)
    for _ in range(5):
        record(job())
    gc.collect()
    assert len(fake._MEMORY) == remembered
    assert len(gc.get_objects()) - before < 500


def test_a_recording_keeps_no_memory_of_the_size_of_its_tensors() -> None:
    import resource

    def program(recorder: Recorder) -> None:
        x = torch.zeros(1 << 32, device="cuda")
        for _ in range(10):
            x = x * 2
        assert recorder.live_bytes == 4 << 32

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recording = record(program)
    assert recording.peak_requested_bytes == 8 << 32
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


@pytest.mark.long
def test_a_step_of_a_small_network_is_recorded_in_a_moment() -> None:
    record(job())
    start = time.process_time()
    recording = record(job())
    spent = time.process_time() - start
    assert spent / len(recording.ops) < 0.002


def test_errors_are_overspills_own() -> None:
    def program(_: Recorder) -> None:
        nn.Linear(3, 4).cuda()(torch.zeros(2, 5, device="cuda"))

    with pytest.raises(OverspillError, match=r"test_records\.py, line \d+"):
        record(program)
