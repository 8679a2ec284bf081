"""The memory that models sharded by `fully_shard` take on one GPU of many."""

import warnings
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from tests.capture.recording.recorded_models import most, most_live
from tests.capture.virtual_gpu.groups import GPUS, LAYERS, LINEAR_BYTES, WIDTH, callers_own, linears, steps
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import init_process_group  # as programs import it, before the capture
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from overspill.capture.virtual_gpu.record import record
from overspill.core import TensorKind


@cache
def sharded(make=linears, host=False, mesh=None, **options):
    """The recording of three steps of FSDP, and what was there before and after them."""
    found = {}

    def program(recorder):
        init_process_group("nccl", world_size=GPUS, rank=0)
        model = make() if host else make().cuda()
        device_mesh = None if mesh is None else init_device_mesh("cuda", mesh, mesh_dim_names=("replicate", "shard"))
        for layer in model:
            fully_shard(layer, mesh=device_mesh, **options)
        fully_shard(model, mesh=device_mesh, **options)
        recorder.mark_module(model)
        found["parameters"] = recorder.live_bytes
        update = torch.optim.Adam(model.parameters(), lr=0.1)
        steps(recorder, model, update, torch.ones(2, WIDTH).cuda())
        found["after"] = recorder.live_bytes
        found["devices"] = {parameter.device.type for parameter in model.parameters()}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return record(program), found


@pytest.mark.parametrize("host", [True, False])
def test_parameters_gradients_and_optimizer_state_are_sharded(host):
    recording, found = sharded(host=host)
    shard = LAYERS * LINEAR_BYTES // GPUS
    assert found["parameters"] == shard
    assert found["devices"] == {"cuda"}
    assert most(recording, TensorKind.OPTIMIZER_STATE) == 2 * shard
    # Parameters, gradients and two moments; the input and the loss besides.
    assert found["after"] == pytest.approx(4 * shard, abs=8192)


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="DTensor of 2.11 reads the generator's state, which an estimate has not"
)
def test_shards_are_drawn_on_the_device():
    def make():
        with torch.device("meta"):
            return nn.Sequential(nn.Linear(WIDTH, WIDTH))

    def program(recorder):
        dist.init_process_group("nccl", world_size=GPUS)
        model = make()
        fully_shard(model)
        model.to_empty(device="cuda")
        for draw in (nn.init.normal_, nn.init.trunc_normal_):
            draw(model[0].weight)
        recorder.mark_module(model)
        steps(recorder, model, torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, WIDTH).cuda())

    assert most(record(program), TensorKind.PARAMETER) >= LINEAR_BYTES // GPUS


def test_a_model_on_the_host_is_never_whole_on_the_device():
    assert most(sharded(host=True)[0], TensorKind.PARAMETER) < LAYERS * LINEAR_BYTES


def test_dimensions_that_do_not_divide_are_padded():
    _, found = sharded(make=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH - 1), nn.Linear(WIDTH - 1, WIDTH)))
    rows = WIDTH // GPUS
    assert found["parameters"] == 4 * (rows * WIDTH + rows + rows * (WIDTH - 1) + rows)


def unsharded_peak(recording):
    """The most bytes of whole parameters that were live at once; shards are made before the first step."""
    made = (a for a in recording.allocations if a.start >= recording.starts[0])
    return most_live(a for a in made if a.kind is TensorKind.PARAMETER)


@pytest.mark.parametrize(("reshard", "layers"), [(True, 2), (False, LAYERS)])
def test_only_the_current_and_the_prefetched_layer_are_whole_or_the_whole_model_waits_for_backward(reshard, layers):
    whole = unsharded_peak(sharded(reshard_after_forward=reshard)[0])
    assert 0 < whole <= layers * LINEAR_BYTES
    assert reshard or whole == layers * LINEAR_BYTES


def test_whole_parameters_are_freed_and_allocated_again_by_their_storage():
    recording, _ = sharded()
    layers = [a for a in recording.allocations if a.kind is TensorKind.PARAMETER and a.name == "3.weight"]
    whole = [a for a in layers if a.nbytes == 4 * WIDTH * WIDTH and a.start >= recording.starts[0]]
    assert len(whole) == 3 * 2  # each of three steps, for forward and for backward
    assert all(a.end <= b.start for a, b in pairwise(whole))


def test_mixed_precision_gathers_in_the_parameters_dtype_and_reduces_in_the_other():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    recording, _ = sharded(mp_policy=policy)
    buffers = {a.nbytes for a in recording.allocations if a.kind is TensorKind.COMMUNICATION}
    # Cast shards and gathered layers in bfloat16, unreduced gradients in float32.
    assert buffers == {LINEAR_BYTES // 2 // GPUS, LINEAR_BYTES // 2, LINEAR_BYTES}
    assert unsharded_peak(recording) <= LINEAR_BYTES


def test_hybrid_sharding_cuts_within_the_inner_dimension():
    _, found = sharded(mesh=(2, 2))
    assert found["parameters"] == LAYERS * LINEAR_BYTES // 2


def test_gathers_and_scatters_have_streams_of_their_own():
    recording, _ = sharded()
    assert {a.stream for a in recording.allocations if a.kind is TensorKind.OPTIMIZER_STATE} == {0}
    gathered = {a.stream for a in recording.allocations if a.kind is TensorKind.COMMUNICATION}
    gradients = {
        a.stream for a in recording.allocations if a.kind is TensorKind.GRADIENT and a.nbytes < LINEAR_BYTES // 2
    }
    assert gathered - {0}
    assert gradients - {0}
    assert not gradients & (gathered - {0})


def test_clipping_the_norm_of_sharded_gradients_is_captured():
    def program(recorder):
        init_process_group("nccl", world_size=GPUS, rank=0)
        model = fully_shard(nn.Linear(WIDTH, WIDTH).cuda())
        model(torch.ones(2, WIDTH).cuda()).sum().backward()
        assert repr(nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()) == "unknown"

    record(program)


@pytest.mark.long
def test_worlds_of_different_meshes_follow_one_another():
    for mesh, gpus in ((None, GPUS), ((2, 2), 2), (None, GPUS)):
        _, found = sharded.__wrapped__(mesh=mesh)
        assert found["parameters"] == LAYERS * LINEAR_BYTES // gpus


class Block(nn.Module):
    """A transformer's layer of ops that run alike on CPU and CUDA: no fused attention, no dropout."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        query, key, value = self.qkv(self.first(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(query @ key.transpose(1, 2), -1) @ value)
        return x + self.down(torch.relu(self.up(self.second(x))))


class Transformer(nn.Module):
    def __init__(self, layers=4, width=128, words=512):
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, x):
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def cut(model, device, **options):
    mesh = init_device_mesh(device, (GPUS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


def torchs_own_peak(iterations, **options):
    """FSDPMemTracker's peak on the CPU, with every collective answered at once."""
    with callers_own("fake", FakeStore(), GPUS):
        model = cut(Transformer(), "cpu", **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        inputs = torch.zeros(8, 64, dtype=torch.int64)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((inputs,))
        with tracker:
            for iteration in range(iterations):
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if iteration == 0:
                    tracker.reset_mod_stats()
        steps_bytes = 4 * sum(1 for _ in model.parameters())
        return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], steps_bytes


@pytest.mark.long
@pytest.mark.parametrize("reshard", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_peak_is_that_of_torchs_own_tracker(reshard):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, steps_bytes = torchs_own_peak(2, reshard_after_forward=reshard)

        def program(recorder):
            init_process_group("nccl", world_size=GPUS, rank=0)
            model = cut(Transformer().cuda(), "cuda", reshard_after_forward=reshard)
            optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
            inputs = torch.zeros(8, 64, dtype=torch.int64).cuda()
            for _ in range(2):
                recorder.start_iteration()
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        found = record(program).peak_requested_bytes
    # The tracker counts Adam's step counters, 4 bytes a parameter, which are on the host.
    assert expected - steps_bytes <= found <= expected


def test_what_lists_of_shards_become_is_asked_once_for_equal_ones(monkeypatch):
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    asked = []
    shapes = ShardingPropagator._propagate_tensor_meta_non_cached

    def counted(self, schema):
        asked.append(max((len(value) for value in schema.args_schema if isinstance(value, (list, tuple))), default=0))
        return shapes(self, schema)

    monkeypatch.setattr(ShardingPropagator, "_propagate_tensor_meta_non_cached", counted)

    def program(recorder):
        init_process_group("nccl", rank=0, world_size=GPUS)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).cuda()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            recorder.start_iteration()
            model(torch.randn(4, WIDTH, device="cuda")).sum().backward()
            optimizer.step()

    state = [a for a in record(program).allocations if a.kind is TensorKind.OPTIMIZER_STATE]
    assert sum(a.nbytes for a in state) >= 2 * LAYERS * LINEAR_BYTES // GPUS
    assert 0 < max(asked) <= 2, "weights and biases, however many layers"
