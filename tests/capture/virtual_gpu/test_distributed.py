"""Process groups that are not there, and the memory that PyTorch's data parallel wrappers take on one GPU of many."""

from functools import cache

import pytest
import torch
import torch.distributed as dist
from tests.capture.recording.recorded_models import most
from tests.capture.virtual_gpu.groups import GPUS, LAYERS, LINEAR_BYTES, WIDTH, callers_own, linears, steps
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.distributed_c10d import init_process_group  # as programs import it, before the capture
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.core import TensorKind
from overspill.core.errors import RequestError


@cache
def trained_by_ddp(make=linears, **options):
    """The recording of three steps of DDP, and the reducer's own account of its buckets."""
    found = {}

    def program(recorder):
        init_process_group("nccl", world_size=GPUS, rank=0)
        model = DistributedDataParallel(make().cuda(), **options)
        recorder.mark_module(model)
        steps(recorder, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, WIDTH).cuda())
        found.update(model._get_ddp_logging_data())

    return record(program), found


def sizes(text):
    return [int(size) for size in text.split(", ")] if text else []


# Storages that change their size


def test_a_storage_that_is_resized_gives_its_memory_back_and_takes_it_again():
    with VirtualGpu() as gpu:
        tensor = torch.empty(1000, device="cuda")
        tensor.untyped_storage().resize_(0)
        assert gpu.recorder.live_bytes == 0
        assert tensor.device.type == "cuda"  # it has no memory, but it has a place
        tensor.untyped_storage().resize_(4000)
        assert gpu.recorder.live_bytes == 4000
        tensor.resize_(2000)
        assert gpu.recorder.live_bytes == 8000
        # While it grows, what it has is copied: the old memory goes after the new one came.
        assert gpu.recorder.peak_bytes == 4000 + 8000
        torch.add(torch.ones(3000, device="cuda"), 1, out=tensor.resize_(0))
        assert gpu.recorder.live_bytes == 12000
        del tensor
        assert gpu.recorder.live_bytes == 0


# Process groups


@pytest.mark.parametrize("backend", ["nccl", "gloo", None])
def test_a_process_group_has_the_size_asked_for_and_no_network(backend):
    with VirtualGpu():
        dist.init_process_group(backend, world_size=64, rank=3)
        assert (dist.get_world_size(), dist.get_rank()) == (64, 3)
        total = torch.ones(4)
        dist.all_reduce(total)
        dist.barrier()


@pytest.mark.parametrize(
    ("environment", "url", "world"),
    [({"WORLD_SIZE": "8", "RANK": "5"}, None, (8, 5)), ({}, "tcp://10.0.0.1:23456?world_size=16&rank=1", (16, 1))],
)
def test_torchruns_environment_or_a_url_says_how_large_the_world_is(environment, url, world, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with VirtualGpu():
        init_process_group("nccl", init_method=url)
        assert (dist.get_world_size(), dist.get_rank()) == world


def test_groups_within_the_world_are_fake_too():
    with VirtualGpu():
        init_process_group("nccl", world_size=8, rank=0)
        half = dist.new_group([0, 2, 4, 6], backend="gloo")
        assert half.size() == 4
        dist.all_reduce(torch.ones(4, device="cuda"), group=half)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"world_size": 0}, "a world of 0 processes; it takes at least 1"),
        ({"world_size": -3}, "a world of -3 processes; it takes at least 1"),
        ({"world_size": 2, "rank": 2}, "rank 2 is outside a world of 2 processes"),
        ({}, "init_process_group needs a world size: pass world_size=, or set WORLD_SIZE"),
    ],
)
def test_impossible_worlds_are_refused_in_one_line(arguments, said, monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with VirtualGpu(), pytest.raises(RequestError, match=f"^{said}$"):
        init_process_group("nccl", **arguments)


def test_a_world_size_that_is_no_number_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "four")
    with VirtualGpu(), pytest.raises(RequestError, match="WORLD_SIZE=four"):
        init_process_group("nccl")


def test_the_process_group_ends_with_the_capture_after_an_error_too():
    def program(recorder):
        init_process_group("nccl", world_size=2, rank=0)
        raise KeyError("the program's own")

    with pytest.raises(RequestError, match="the program's own"):
        record(program)
    assert not dist.is_initialized()


def test_a_process_group_of_the_caller_stays_and_is_not_used():
    with callers_own("gloo", dist.HashStore()):
        with VirtualGpu():
            model = nn.Linear(4, 4).cuda()
            with pytest.raises(RequestError, match="there already"):
                DistributedDataParallel(model)
            with pytest.raises(RequestError, match="there already"):
                fully_shard(model)
        assert dist.is_initialized()
        assert dist.get_backend() == "gloo"


# DistributedDataParallel

OPTIONS = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
    {"bucket_cap_mb": 3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_buckets_are_those_of_a_real_run_and_are_allocated(options):
    recording, found = trained_by_ddp(**options)
    with callers_own("gloo", dist.HashStore()):
        model = DistributedDataParallel(linears(), **options)
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
        real = model._get_ddp_logging_data()
        del model
    assert found["bucket_sizes"] == real["bucket_sizes"]
    assert found.get("rebuilt_bucket_sizes") == real.get("rebuilt_bucket_sizes")
    made = [a.nbytes for a in recording.allocations if a.name == "empty" and a.kind is TensorKind.COMMUNICATION]
    if options.get("static_graph"):  # torch rebuilds its buckets and does not log it
        assert sum(made) == 2 * LAYERS * LINEAR_BYTES
    elif not options.get("gradient_as_bucket_view"):  # with it, buckets are the gradients
        # Logged in the order of construction; allocated in the order in which they are filled.
        expected = sizes(found["bucket_sizes"]) + sizes(found.get("rebuilt_bucket_sizes", ""))
        assert sorted(made) == sorted(expected)


def test_first_buckets_go_when_buckets_are_rebuilt():
    recording, _ = trained_by_ddp()
    assert most(recording, TensorKind.COMMUNICATION) == LAYERS * LINEAR_BYTES  # never first and rebuilt ones at once
    buckets = [a for a in recording.allocations if a.kind is TensorKind.COMMUNICATION]
    assert sum(a.nbytes for a in buckets if a.start <= recording.starts[-1] < a.end) == LAYERS * LINEAR_BYTES


def test_gradients_as_views_of_buckets_save_one_copy_of_them():
    (apart, _), (together, _) = trained_by_ddp(), trained_by_ddp(gradient_as_bucket_view=True)
    saved = apart.peak_requested_bytes - together.peak_requested_bytes
    # Each gradient is whole until it is copied into its bucket: of the last one, and what it is made from, not saved.
    assert saved == pytest.approx(LAYERS * LINEAR_BYTES, abs=1.1 * LINEAR_BYTES)


def test_ddp_adds_buckets_as_large_as_the_gradients():
    def alone(recorder):
        model = linears().cuda()
        recorder.mark_module(model)
        steps(recorder, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, WIDTH).cuda())

    assert trained_by_ddp()[0].peak_requested_bytes == record(alone).peak_requested_bytes + LAYERS * LINEAR_BYTES


def test_parameters_without_a_gradient_have_their_place_in_a_bucket():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.used(x)

    recording, _ = trained_by_ddp(make=Half, find_unused_parameters=True)
    assert most(recording, TensorKind.COMMUNICATION) == 2 * LINEAR_BYTES


def test_a_communication_hook_gets_its_buckets():
    seen = []

    def hook(state, bucket):
        seen.append(bucket.buffer().nbytes)
        return default_hooks.fp16_compress_hook(None, bucket)

    def program(recorder):
        init_process_group("nccl", world_size=GPUS, rank=0)
        model = DistributedDataParallel(linears().cuda())
        model.register_comm_hook(None, hook)
        steps(recorder, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, WIDTH).cuda())

    record(program)
    assert sum(seen) == 3 * LAYERS * LINEAR_BYTES


def test_synchronised_batch_norm_gathers_the_statistics_of_all():
    def program(recorder):
        init_process_group("nccl", world_size=GPUS, rank=0)
        layers = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(layers).cuda())
        steps(recorder, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 3, 8, 8).cuda())

    recording = record(program)
    gathered = [a.nbytes for a in recording.allocations if a.layer.endswith(".1")]
    assert 4 * GPUS * (2 * 16 + 1) in gathered  # a mean and a deviation a channel and a count, from each GPU
