"""Programs run on the virtual GPU as they would on a real one: where tensors are, what torch.cuda says, what is refused."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from tests.capture.virtual_gpu.virtual import CPU, GPU, F, batch, mlp, refused_in_another_thread
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, get_worker_info

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.capture.virtual_gpu.script_patches import script_patches
from overspill.capture.virtual_gpu.values.real_values import values_of
from overspill.core.errors import UnsupportedError


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)])
def test_every_way_to_say_gpu(gpu: VirtualGpu, device: Any) -> None:
    host = torch.randn(3)
    there = host.to(device)
    assert there.device == GPU
    assert there.is_cuda
    assert there.get_device() == 0
    assert not there.is_cpu
    assert host.device == CPU
    assert host.cuda(device).is_cuda
    assert there.to(device) is there
    assert torch.zeros(3, device=device).is_cuda
    assert torch.tensor([1.0], device=device).is_cuda
    assert torch.tensor(np.ones(3), device=device).is_cuda
    assert torch.as_tensor(np.ones(3, np.float32), device=device).is_cuda
    assert nn.Linear(2, 2, device=device).weight.is_cuda
    assert nn.Linear(2, 2).to(device).weight.is_cuda
    assert nn.utils.rnn.pack_sequence([torch.ones(2)]).to(device).data.is_cuda
    assert there.new_zeros(2).is_cuda
    assert torch.empty_like(host, device=device).is_cuda


def test_a_number_is_a_device_of_torchs_own(gpu: VirtualGpu) -> None:
    device = torch.device(0)
    assert device == GPU == torch.device("cuda", 0) == pickle.loads(pickle.dumps(device))
    assert isinstance(device, torch.device)
    assert not isinstance("cuda", torch.device)
    assert torch.ones(2, device=device).is_cuda
    with torch.device(device):
        assert torch.ones(2).is_cuda


def test_the_device_meta_has_no_memory_here_or_there(gpu: VirtualGpu) -> None:
    for x in (torch.ones(2), torch.ones(2, device="cuda"), torch.empty(1 << 40, device="meta")):
        assert x.to("meta").device.type == "meta"
    before = gpu.recorder.live_bytes
    with torch.device("meta"):
        model = nn.Linear(1 << 20, 1 << 10)
    model.weight.data.normal_()
    assert (model.weight.device.type, gpu.recorder.live_bytes) == ("meta", before)
    assert mlp().to("meta")[0].weight.device.type == "meta"
    model.to_empty(device="cuda")
    assert isinstance(model.weight, nn.Parameter)
    assert model.weight.is_cuda
    assert gpu.recorder.live_bytes - before == 4 * ((1 << 30) + (1 << 10))


def test_a_module_with_an_own_way_to_move_need_not_know_torchs_newest(gpu: VirtualGpu) -> None:
    class Metric(nn.Module):
        def _apply(self, fn: Callable[[Tensor], Tensor], exclude: str = "") -> nn.Module:
            assert "state" not in exclude
            return super()._apply(fn)

    assert nn.Sequential(Metric(), nn.Linear(2, 2)).cuda()[1].weight.is_cuda


def test_every_argument_of_to(gpu: VirtualGpu) -> None:
    host = torch.randn(2, 3, 4, 4)
    there = host.to(device="cuda", dtype=torch.float16, non_blocking=True, memory_format=torch.channels_last)
    assert there.is_cuda
    assert there.dtype is torch.float16
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert host.to(there).dtype is torch.float16
    assert host.to(there).is_cuda
    assert host.to(other=there).is_cuda
    assert host.type_as(there).is_cuda
    assert there.float().type_as(there).is_cuda
    assert there.to(host).device == CPU
    assert there.to(host).dtype is torch.float32
    assert there.to(torch.float64).is_cuda
    assert there.to(torch.float16) is there
    assert there.to(torch.float16, copy=True) is not there
    assert there.to("cuda", torch.float16, False, True) is not there
    assert there.to("cuda", torch.float16, False, False) is there
    assert there.to(there, copy=True) is not there
    assert there.to("cpu", torch.float64).dtype is torch.float64
    assert there.cpu().device == CPU
    assert there.cpu().cuda().is_cuda
    assert there.half() is there
    assert there.float().is_cuda


def test_a_copy_has_memory_of_its_own() -> None:
    seen = []

    def program(recorder: Any) -> None:
        x = torch.zeros(100, device="cuda")
        for make in (lambda: x.to("cuda"), lambda: x.to("cuda", copy=True), x.half, x.cpu, x.clone, lambda: x.data):
            before = recorder.live_bytes
            made = make()
            seen.append(recorder.live_bytes - before)
            del made

    record(program)
    assert seen == [0, 400, 200, 0, 400, 0]


def test_factories_and_their_likes_go_where_they_are_told(gpu: VirtualGpu) -> None:
    there = torch.zeros(3, device="cuda")
    assert there.new_zeros(3, device="cpu").device == CPU
    assert torch.zeros_like(there, device="cpu").device == CPU
    for make in (
        torch.zeros,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.empty,
        torch.arange,
        torch.randperm,
        torch.eye,
    ):
        assert make(3, device="cuda").is_cuda
        assert make(3).device == CPU
    assert torch.full((3,), 1.0, device="cuda").is_cuda
    assert torch.as_tensor([1.0], device="cuda").is_cuda
    assert torch.linspace(0, 1, 5, device="cuda").is_cuda
    assert torch.from_numpy(torch.ones(3).numpy()).cuda().is_cuda
    assert torch.empty(4, pin_memory=True).device == CPU


def test_what_a_host_has_no_room_for_is_made_without_it_and_without_values(gpu: VirtualGpu) -> None:
    experts = nn.Parameter(torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16))
    assert experts.data.zero_().cuda().nbytes == gpu.recorder.live_bytes == 1 << 41
    assert values_of(torch.zeros(1 << 28)) is None
    assert values_of(torch.zeros(1 << 20)) is not None


def test_types_by_name(gpu: VirtualGpu) -> None:
    there, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    assert there.type() == "torch.cuda.FloatTensor"
    assert host.type() == "torch.FloatTensor"
    assert host.type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"
    assert there.type(torch.float64).type() == "torch.cuda.DoubleTensor"
    assert there.type("torch.LongTensor").device == CPU
    assert there.type(torch.FloatTensor).device == CPU
    assert host.type(torch.cuda.FloatTensor).is_cuda
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert torch.cuda.LongTensor([1, 2]).dtype is torch.int64
    assert isinstance(there, torch.cuda.FloatTensor)
    assert not isinstance(host, torch.cuda.FloatTensor)
    with pytest.raises(ValueError, match="invalid type"):
        there.type("torch.cuda.OddTensor")


def test_gradients_cross_between_host_and_device_as_tensors_do(gpu: VirtualGpu) -> None:
    x, seen = torch.zeros(10, device="cuda", requires_grad=True), []
    away = (x * 2).cpu()
    back = (away * 3).cuda()
    away.register_hook(lambda grad: seen.append(grad.device))
    back.register_hook(lambda grad: seen.append(grad.device))
    back.sum().backward()
    assert seen == [GPU, CPU]
    assert x.grad.is_cuda
    weight = nn.Parameter(torch.zeros(10))
    (weight.cuda() * 2).sum().backward()
    assert weight.grad.device == CPU


def test_what_programs_ask_torch_cuda(gpu: VirtualGpu) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == 1 << 40
    assert torch.cuda.memory_allocated() == 0
    kept = torch.zeros(100, device="cuda")
    assert torch.cuda.memory_allocated() == 400
    free, total = torch.cuda.mem_get_info()
    assert total - free == 400
    del kept
    assert torch.cuda.max_memory_allocated() == 400
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    for function in (torch.cuda.synchronize, torch.cuda.empty_cache, torch.cuda.init, torch.cuda.memory_summary):
        function()
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_device(0)
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    assert torch.cuda.is_bf16_supported()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert event.elapsed_time(event) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda


def test_scripted_functions_and_compiled_models_run(gpu: VirtualGpu) -> None:
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated

    @torch.jit.script
    def scaled(x: Tensor) -> Tensor:
        return x * torch.ones(1)

    assert scaled(torch.ones(2)).tolist() == [1.0, 1.0]
    model = torch.compile(mlp().cuda())
    model(batch()).sum().backward()


def test_data_loaders_feed_the_device(gpu: VirtualGpu) -> None:
    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10) % 4)
    seen = 0
    for x, y in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):
        seen += len(y)
        assert int(y.max()) < 4  # the host's values are real
        F.cross_entropy(nn.Linear(2, 4).cuda()(x.cuda(non_blocking=True)), y.to("cuda")).backward()
    assert seen == 10


class Shard(IterableDataset[Tensor]):
    """An endless data set that a worker opens."""

    start: int | None = None

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        assert worker is not None
        assert self.start is not None
        for number in count(self.start):
            yield torch.tensor(number * worker.num_workers + worker.id)


def opened(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.start = 5 + worker


def test_a_data_set_sees_the_first_of_the_workers_that_were_asked_for(gpu: VirtualGpu) -> None:
    with script_patches():
        loader = DataLoader(
            Shard(), 2, num_workers=3, worker_init_fn=opened, persistent_workers=True, prefetch_factor=4, timeout=9
        )
        found = iter(loader)
        assert [next(found).tolist() for _ in range(2)] == [[15, 18], [21, 24]]
        assert get_worker_info() is None
        assert [x.tolist() for (x,) in DataLoader(TensorDataset(torch.arange(2)))] == [[0], [1]]


def _padded(samples: list[Tensor]) -> Tensor:
    rows = torch.zeros(len(samples), 4)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample
    return rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("collate", [default_collate, _padded])
def test_samples_of_a_worker_are_made_by_plain_torch_unless_they_have_no_values(
    gpu: VirtualGpu, workers: int, collate: Callable[..., Tensor]
) -> None:
    class Samples(Dataset[Tensor]):
        modes: ClassVar[list[bool]] = []

        def __init__(self, values: Tensor) -> None:
            self.values = values

        def __len__(self) -> int:
            return 2

        def __getitem__(self, n: int) -> Tensor:
            self.modes.append(_get_current_dispatch_mode() is None)
            return self.values + n

    def batch_of(values: Tensor) -> Tensor:
        Samples.modes.clear()
        (batch,) = DataLoader(Samples(values), 2, num_workers=workers, collate_fn=collate)
        return batch

    with script_patches():
        assert batch_of(torch.ones(3))[:, :3].tolist() == [[1, 1, 1], [2, 2, 2]]
        assert Samples.modes == [workers > 0] * 2
        unknown = batch_of(nn.Parameter(torch.ones(3)).detach())
        assert values_of(unknown) is values_of(unknown.cuda()) is None
        assert Samples.modes[-2:] == [False] * 2


def test_bfloat16_is_said_as_torch_says_it() -> None:
    with VirtualGpu(capability=(7, 5)):
        assert torch.cuda.is_bf16_supported()
        assert not torch.cuda.is_bf16_supported(including_emulation=False)


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        lambda: (
            nn.Embedding(10, 4, sparse=True).cuda()(torch.zeros(3, dtype=torch.int64, device="cuda")).sum().backward()
        ),
        lambda: torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (2, 2)).cuda(),
    ],
)
def test_sparse_tensors_are_said_not_to_be_supported(program: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"test_virtual_gpu\.py:\d+.*Sparse"):
        record(lambda _: program())


def test_a_thread_that_uses_the_device_is_told_so() -> None:
    error = refused_in_another_thread(lambda: torch.ones(3).cuda())
    assert "thread of its own" in str(error)


def test_a_pool_of_threads_works_in_the_scripts_own(gpu: VirtualGpu) -> None:
    with script_patches(), ThreadPoolExecutor(2) as pool:  # as transformers loads weights
        assert [tensor.is_cuda for tensor in pool.map(lambda n: torch.ones(n).cuda(), (1, 2))] == [True, True]
        failed = pool.submit(int, "nothing")
        assert isinstance(failed.exception(), ValueError)


def test_of_several_processes_the_first_runs_here(gpu: VirtualGpu) -> None:
    model, seen = torch.nn.Linear(2, 2).cuda().share_memory(), []
    with script_patches():
        processes = [torch.multiprocessing.Process(target=seen.append, args=(rank,)) for rank in range(3)]
        for process in processes:
            process.start()
            process.join()
    assert seen == [0]
    assert model.weight.is_cuda
