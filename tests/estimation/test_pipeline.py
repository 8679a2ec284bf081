"""Stages of a pipeline, each against bytes that can be worked out by hand."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
from tests.estimation.by_hand import CUT, LINEAR, NETWORK, POSITIONS, TOKENS, UNCUT, alive, llama, trained
from torch import nn

from overspill import models
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.estimation.programs import program_of
from overspill.job import Job, NamedModel, Parallel

DECODER = "decoder:width=64,depth=4,heads=4,vocabulary=211,seq_len=32"
BLOCK = 4 * (sum(read * made + made for read, made in LINEAR) + 4 * 64)  # weights, biases and both norms
TOKEN_WEIGHTS, POSITION_WEIGHTS, LAST_NORM = 4 * 211 * 64, 4 * POSITIONS * 64, 4 * 2 * 64


@cache
def stage(at: int, gpus: int = 4, micro_batches: int | None = None, **fields: Any) -> Recording:
    """A step of two samples each micro-batch, in four stages of a block each."""
    parallel = Parallel("pp", gpus, micro_batches=micro_batches, stage=at)
    model = NamedModel(DECODER)
    return record(program_of(Job(model, 2 * parallel.pieces, "adamw", parallel=parallel, **fields)))


def test_a_stage_has_its_blocks_and_what_is_at_its_end() -> None:
    weights = [alive(stage(at))[TensorKind.PARAMETER] for at in range(4)]
    assert weights == [BLOCK + TOKEN_WEIGHTS + POSITION_WEIGHTS, BLOCK, BLOCK, BLOCK + LAST_NORM + TOKEN_WEIGHTS]
    for at, own in enumerate(weights):
        assert alive(stage(at))[TensorKind.OPTIMIZER_STATE] == 2 * own


@pytest.mark.long
def test_of_stages_each_has_a_micro_batch_more_under_way_than_the_next() -> None:
    hidden = 4 * 2 * TOKENS * 64
    second, third = (stage(at, checkpointing=True).peak_requested_bytes for at in (1, 2))
    assert second - third == 2 * hidden  # what was received, and what was sent


@pytest.mark.long
def test_a_pipeline_of_one_stage_accumulates() -> None:
    accumulated = record(program_of(Job(NamedModel(DECODER), 2, "adamw", accumulate=2)))
    alone = [op.name for op in stage(0, gpus=1, micro_batches=2).ops]
    assert Counter(alone) == Counter(op.name for op in accumulated.ops)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["amp", "amp-bfloat16", "bfloat16"])
def test_stages_are_trained_in_every_dtype(dtype: str) -> None:
    own = BLOCK // (2 if dtype == "bfloat16" else 1)
    assert alive(stage(1, dtype=dtype, checkpointing=True))[TensorKind.GRADIENT] == own


@pytest.mark.long
def test_the_answer_is_of_the_stage_that_needs_most() -> None:
    from overspill import estimate

    made = estimate(DECODER, optimizer="adamw", batch=8, parallel=Parallel("pp", 4))
    assert made.stages == {at: stage(at).peak_requested_bytes for at in (0, 1, 3)}
    assert made.recording == stage(0)
    assert "stage 1 of 4   needs most" in made.explain()


@pytest.mark.long
def test_stages_of_transformers_have_its_layers() -> None:
    pytest.importorskip("transformers")
    stages = [Parallel("pp", 2, stage=at) for at in (0, 1)]
    first, last = (alive(llama("adamw", parallel=stage))[TensorKind.PARAMETER] for stage in stages)
    assert first + last == UNCUT + CUT
    assert last - first == 4 * 64  # the last norm


@pytest.mark.long
def test_the_first_stage_has_no_more_under_way_than_there_are_micro_batches() -> None:
    assert [most_at_once(stage(0, micro_batches=m)) for m in (1, 2, 4, 8)] == [1, 2, 4, 4]
    assert [most_at_once(stage(at, micro_batches=8)) for at in range(4)] == [4, 3, 2, 1]


@pytest.mark.long
def test_weights_that_no_stage_runs_are_refused() -> None:
    def load() -> models.BuiltModel:
        job = models.load(DECODER)
        job.module.spare = nn.Linear(2, 2)
        return job

    with pytest.raises(RequestError, match="no stage"):
        record(program_of(Job(load, 4, parallel=Parallel("pp", 2))))


def most_at_once(recording: Recording) -> int:
    """Of how many micro-batches there are the hidden values of the MLP at once."""
    wide = [a for a in recording.allocations if a.nbytes == 4 * 2 * TOKENS * 256 and a.kind is TensorKind.ACTIVATION]
    return max(sum(b.start <= a.start < b.end for b in wide if b.layer == a.layer and b.op == b.op) for a in wide)


def test_the_first_stages_have_the_blocks_that_are_left_and_stages_are_of_decoders() -> None:
    weights = [alive(stage(at, gpus=3))[TensorKind.PARAMETER] for at in range(3)]
    ends = [TOKEN_WEIGHTS + POSITION_WEIGHTS, 0, LAST_NORM + TOKEN_WEIGHTS]
    assert weights == [blocks * BLOCK + end for blocks, end in zip((2, 1, 1), ends, strict=True)]
    with pytest.raises(RequestError, match="4 blocks"):
        stage(0, gpus=5)
    with pytest.raises(RequestError, match="Sequential"):
        trained(parallel=Parallel("pp", 2))
    with pytest.raises(RequestError, match="of 4 micro-batches"):
        Job(NETWORK, 6, parallel=Parallel("pp", 2, micro_batches=4)).check_batch()
