"""Data parallel training in estimates: what several GPUs add to the memory of one, and what they take from it."""

import dataclasses
import re

import pytest
import torch
from tests.capture.recording.recorded_models import most
from torch import nn

from overspill import models
from overspill.capture.virtual_gpu.record import record
from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.costs.interval import NOTHING
from overspill.costs.nccl import nccl_bytes
from overspill.devices import load_device
from overspill.estimation import Estimate
from overspill.estimation.programs import ITERATIONS, program_of
from overspill.job import GivenModel, Job, NamedModel, Parallel
from overspill.job.parallel import parallel_of
from overspill.job.prepare.checkpointing import repeated_blocks
from overspill.models import DTYPES

A100 = load_device("a100-80gb")
WIDTH, LAYERS = 256, 8
MODEL_BYTES = LAYERS * 4 * (WIDTH * WIDTH + 2 * WIDTH + WIDTH)
BUFFER_BYTES = LAYERS * (2 * 4 * WIDTH + 8)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.relu(self.linear(self.norm(x)))


def network():
    return nn.Sequential(*(Layer() for _ in range(LAYERS)))


def recorded(parallel, *, dtype="float32", optimizer="sgd", build=network):
    model = GivenModel(build, torch.zeros(4, WIDTH), lambda module, x: module(x).sum())
    return record(program_of(Job(model, 4, optimizer, dtype, parallel=parallel)))


def estimated(parallel, **options):
    return Estimate("network", recorded(parallel, **options), A100, parallel=parallel)


KINDS = [
    Parallel("ddp", 4),
    Parallel("ddp", 4, gradient_as_bucket_view=True),
    Parallel("ddp", 4, find_unused_parameters=True),
    Parallel("ddp", 4, static_graph=True, bucket_cap_mb=1),
    Parallel("fsdp", 4),
    Parallel("fsdp", 4, reshard_after_forward=False),
    Parallel("fsdp", 4, replicas=2),
    Parallel("fsdp", 4, param_dtype="bfloat16", reduce_dtype="float32"),
    Parallel("fsdp", 4, blocks=("Linear",)),
    Parallel("horovod", 4),
]


@pytest.mark.parametrize("parallel", [*KINDS[::4], *(pytest.param(k, marks=pytest.mark.long) for k in KINDS)], ids=str)
def test_the_breakdown_of_parallel_training_adds_up(parallel):
    estimate = estimated(parallel)
    assert sum(estimate.breakdown.values()) == estimate.total_bytes
    assert estimate.total_bytes == (
        estimate.peak_reserved_bytes + estimate.context_bytes + estimate.communication.central
    )
    assert estimate.breakdown["communication"] >= estimate.communication.central > 0


QUICK = {("ddp", "amp"), ("fsdp", "bfloat16"), ("horovod", "float32")}


@pytest.mark.short("ddp-amp", "horovod-float32")
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=() if (kind, dtype) in QUICK else pytest.mark.long)
        for kind in ("ddp", "fsdp", "horovod")
        for dtype in DTYPES
    ],
)
def test_every_kind_runs_in_every_dtype(kind, dtype):
    assert recorded(Parallel(kind, 2), dtype=dtype, optimizer="adamw").iterations == ITERATIONS


@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "bert-base", "resnet50")]
)
@pytest.mark.parametrize("kind", ["ddp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("fsdp", "horovod"))])
def test_built_in_models_train_in_parallel(model, kind):
    program = program_of(Job(NamedModel(model), 2, "adamw", parallel=Parallel(kind, 8)))
    alone = program_of(Job(NamedModel(model), 2, "adamw"))
    several, one = record(program), record(alone)
    assert several.parameters == one.parameters
    state = most(several, TensorKind.OPTIMIZER_STATE)
    if kind == "fsdp":
        assert state == pytest.approx(most(one, TensorKind.OPTIMIZER_STATE) / 8, rel=0.01)  # padding
    else:
        assert state == most(one, TensorKind.OPTIMIZER_STATE)


def test_buckets_are_shown_as_communication():
    # At each forward, the first process also sends its running statistics, gathered in one tensor.
    assert most(recorded(Parallel("ddp", 4)), TensorKind.COMMUNICATION) == MODEL_BYTES + BUFFER_BYTES


@pytest.mark.long
def test_bucket_views_save_the_gradients():
    apart = recorded(Parallel("ddp", 4)).peak_requested_bytes
    together = recorded(Parallel("ddp", 4, gradient_as_bucket_view=True)).peak_requested_bytes
    assert apart - together == pytest.approx(MODEL_BYTES, rel=1.5 / LAYERS)  # a layer's are whole at first


@pytest.mark.long
def test_horovod_adds_its_fusion_buffer(monkeypatch):
    alone = recorded(None).peak_requested_bytes
    assert recorded(Parallel("horovod", 4)).peak_requested_bytes == alone + (64 << 20)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", str(8 << 20))
    assert recorded(Parallel("horovod", 4)).peak_requested_bytes == alone + (8 << 20)
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
    assert recorded(Parallel("horovod", 4)).peak_requested_bytes == alone


@pytest.mark.long
def test_more_gpus_leave_less_of_the_model_on_each():
    # A batch that is small beside the model: what is sharded decides.
    peaks = [recorded(Parallel("fsdp", gpus), optimizer="adamw").peak_requested_bytes for gpus in (1, 2, 4, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


@pytest.mark.long
def test_replicas_shard_within_their_group():
    hybrid, plain = (recorded(p) for p in (Parallel("fsdp", 8, replicas=4), Parallel("fsdp", 2)))
    assert hybrid.peak_requested_bytes == plain.peak_requested_bytes


# Communication


@pytest.mark.parametrize(
    ("parallel", "communicators"),
    [
        (Parallel("ddp", 8), 1),
        (Parallel("fsdp", 8), 1),
        (Parallel("fsdp", 8, replicas=2), 2),
        (Parallel("fsdp", 8, replicas=8), 1),
        (Parallel("horovod", 8), 1),
    ],
)
def test_communicators_are_those_that_the_wrapper_makes(parallel, communicators):
    assert parallel.communication(A100) == nccl_bytes(A100, 8, communicators=communicators)


def test_communication_is_that_of_the_gpu_that_is_asked_about():
    estimate = estimated(Parallel("ddp", 4))
    other = load_device("t4")
    assert estimate.on(other).communication == nccl_bytes(other, 4) != estimate.communication


def test_one_gpu_has_nothing_to_say_to_others():
    assert estimated(None).communication == NOTHING
    assert Parallel("ddp", 1).communication(A100) == NOTHING


# Blocks


@pytest.mark.parametrize(
    ("model", "blocks"),
    [("resnet50", 16), *(pytest.param(m, 12, marks=pytest.mark.long) for m in ("gpt2", "bert-base"))],
)
def test_blocks_are_what_a_model_repeats(model, blocks):
    found = list(repeated_blocks(models.load(model).module))
    assert len(found) == blocks


def test_blocks_of_an_encoder_and_a_decoder_are_both_found():
    found = [type(block) for block in repeated_blocks(nn.Transformer(32, 4, 2, 3, 64, batch_first=True))]
    assert found == [nn.TransformerEncoderLayer] * 2 + [nn.TransformerDecoderLayer] * 3


def test_a_model_without_blocks_is_refused_in_one_line():
    build = lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))  # noqa: E731
    with pytest.raises(RequestError, match=r"Sequential .*blocks=\(\.\.\.\)$"):
        recorded(Parallel("fsdp", 2), build=build)
    assert recorded(Parallel("fsdp", 2, blocks=("Linear",)), build=build).peak_requested_bytes
    with pytest.raises(RequestError, match="class Bottleneck"):
        recorded(Parallel("fsdp", 2, blocks=("Bottleneck",)), build=build)


# Requests


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "ring"}, "unknown kind of parallel training 'ring'; kinds: ddp, fsdp, horovod, tp, pp"),
        ({"gpus": 0}, "gpus=0 is not a positive number"),
        ({"gpus": -4}, "gpus=-4 is not a positive number"),
        ({"kind": "fsdp", "gpus": 8, "replicas": 3}, "replicas=3 does not divide gpus=8"),
        ({"kind": "fsdp", "replicas": 0}, "replicas=0 does not divide gpus=2"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb=0 is not a positive number"),
        ({"micro_batches": 2}, "micro_batches= is an option of pp, not of ddp"),
        ({"kind": "pp", "micro_batches": 0}, "micro_batches=0 is not a positive number"),
        ({"kind": "pp", "stage": 2}, "stage=2 is none of 2 stages, counted from 0"),
        ({"kind": "fsdp", "param_dtype": "int8"}, "unknown dtype 'int8'; dtypes: bfloat16, float16, float32"),
        ({"kind": "fsdp", "static_graph": True}, "static_graph= is an option of ddp, not of fsdp"),
        ({"kind": "ddp", "reshard_after_forward": False}, "reshard_after_forward= is an option of fsdp, not of ddp"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(options, said):
    with pytest.raises(RequestError) as refused:
        Parallel(**options)
    assert re.match(rf"{re.escape(said)}(; |$)", str(refused.value)), "in one line, and what would work behind it"


def test_a_request_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Parallel().gpus = 3


def test_the_command_lines_options_make_a_request():
    assert parallel_of(None, None) is None
    assert parallel_of(None, 1) is None
    assert parallel_of(None, 4) == Parallel("ddp", 4)
    assert parallel_of("fsdp", 8) == Parallel("fsdp", 8)
    with pytest.raises(RequestError, match="--gpus"):
        parallel_of("fsdp", None)
    with pytest.raises(RequestError, match="0 GPUs"):
        parallel_of("ddp", 0)


def test_inference_in_parallel_is_refused():
    with pytest.raises(RequestError, match="ddp"):
        program_of(Job(NamedModel("gpt2"), 1, None, parallel=Parallel()))


def test_a_model_with_nothing_to_train_is_refused():
    with pytest.raises(RequestError, match="nothing to train"):
        recorded(Parallel("ddp", 2), build=lambda: network().requires_grad_(False), optimizer="sgd")
