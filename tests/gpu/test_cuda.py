"""The CUDA path on a real device: pinned memory, two copy streams, exact numbers, planned peak. Skipped without one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core.errors import UnsupportedError
from overspill.job import Job
from overspill.models import load
from overspill.policies import POLICIES
from overspill.runtime import training as runs
from overspill.runtime.hardware import device_noun
from overspill.runtime.options import Options
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

pytestmark = pytest.mark.gpu

train, train_plain = (partial(run, device="cuda") for run in (runs.train, runs.train_plain))


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_tensor_survives_the_trip_to_pinned_memory_and_back() -> None:
    device = torch.device("cuda")
    engine = make_engine(make_store(None, device), device)
    source = torch.randn(3, 64, 33, 33, device=device).to(memory_format=torch.channels_last)
    expected = source.clone(memory_format=torch.preserve_format)
    handle = engine.offload(source)
    engine.await_offload(handle)
    del source
    torch.full((3 * 64 * 33 * 33,), 7.0, device=device)  # what was freed is soon written again
    back = engine.prefetch(handle)
    engine.await_prefetch(back)
    assert torch.equal(back, expected)
    assert back.stride() == expected.stride()
    engine.close()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", ["resnet18", "gpt2"])
def test_training_on_the_gpu_is_bit_identical(model: str, policy: str, deterministic) -> None:
    job = Job(lambda: load(model, small=True), 4, "momentum")
    managed = train(job, Options(budget="4GiB", policy=policy))
    assert managed.identical_to(train_plain(job, Options()))


def test_a_budget_halves_the_allocated_peak_of_resnet50(deterministic) -> None:
    job = Job(lambda: load("resnet50"), 32, "sgd")
    managed, plain = train(job, Options(budget=0.5)), train_plain(job, Options())
    assert managed.losses == plain.losses
    assert managed.plan is not None
    assert managed.plan.offloaded_bytes > 0
    assert managed.measured_peak_bytes < 0.75 * plain.measured_peak_bytes  # kernels' workspaces come on top of the plan


def test_a_card_of_exactly_the_budget_is_enough(deterministic) -> None:
    """`set_per_process_memory_fraction` makes the card so small that one segment more than planned is out of memory."""
    job = Job(lambda: load("resnet50"), 16, "sgd")
    x = torch.ones(8, 8, device="cuda", requires_grad=True)
    (x @ x).sum().backward()  # cuBLAS keeps memory, which else would lie among what the first job leaves
    whole = train(job, Options()).planned_device_bytes
    assert whole is not None
    total = torch.cuda.get_device_properties(0).total_memory
    context = device_noun(torch.device("cuda")).context_bytes
    for share in (1.0, 0.8, 0.7):
        budget = int(share * whole)
        torch.cuda.memory.reset_accumulated_memory_stats()
        torch.cuda.set_per_process_memory_fraction((budget - context) / total)
        try:
            run = train(job, Options(budget=budget))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert run.reserved_peak_bytes is not None
        assert run.planned_reserved_bytes is not None
        assert run.reserved_peak_bytes <= run.planned_reserved_bytes <= budget - context
        assert not torch.cuda.memory_stats()["num_alloc_retries"]


def test_the_measured_peak_does_not_depend_on_what_ran_before() -> None:
    job = Job(lambda: load("resnet18"), 16, "sgd")
    peaks = [
        (train_plain(job, Options()).measured_peak_bytes, train(job, Options()).measured_peak_bytes) for _ in range(2)
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("whole_step", [False, True])
def test_inductors_kernels_take_inputs_that_are_not_aligned(whole_step: bool, deterministic) -> None:
    """Inductor takes 16 bytes for granted where the first call has them, and a view of a batch may begin anywhere."""

    def losses(train: Callable[[Tensor], Tensor]) -> list[float]:
        numbers = torch.arange(8 * 65, dtype=torch.float32, device="cuda").sin().view(-1)
        return [train(numbers[begin : begin + 512].view(8, 64)).item() for begin in (0, 1, 0)]

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)).cuda()
        return model, torch.optim.SGD(model.parameters(), 0.1)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.clone()).square().mean() + x.cos().mean()

    def loop(called: Callable[[nn.Module, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        model, optimizer = made()

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            value = called(model, x)
            value.backward()
            optimizer.step()
            return value.detach()

        return step

    if whole_step:
        model, optimizer = made()
        step = overspill.train_step(model, loss, optimizer, backend="inductor")
        ours, plans = losses(step), step.plans
    else:
        compiled = overspill.compile(loss, backend="inductor")
        ours, plans = losses(loop(compiled)), compiled.overspill.plans
    assert ours == losses(loop(torch.compile(loss)))
    assert any(op.name.startswith("triton_") for op in plans[0].graph.ops)


@pytest.mark.parametrize("whole_step", [False, True])
def test_recurrent_layers_of_cudnn_are_refused_with_what_works(
    whole_step: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = nn.GRU(16, 16).cuda(), torch.randn(4, 2, 16, device="cuda")

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)[0].square().mean()

    def trained() -> Tensor:
        if whole_step:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            return overspill.train_step(model, loss, optimizer, budget="smallest")(x)
        return loss(overspill.compile(model, budget="smallest"), x)

    with pytest.raises(UnsupportedError, match="cudnn"):
        trained()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    torch._dynamo.reset()
    trained()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_model_larger_than_its_budget_trains_from_the_host_bit_identical(
    mapped: bool, deterministic, tmp_path: Path
) -> None:
    """Frozen layers with adapters; the budget has a quarter of the weights. Of a file, the weights are read from there."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.ModuleList(nn.Linear(2048, 2048, bias=False).requires_grad_(False) for _ in range(16))
            self.down = nn.ModuleList(nn.Linear(2048, 8, bias=False) for _ in range(16))
            self.up = nn.ModuleList(nn.Linear(8, 2048, bias=False) for _ in range(16))

        def forward(self, x: Tensor) -> Tensor:
            for base, down, up in zip(self.base, self.down, self.up, strict=True):
                x = torch.relu(base(x) + up(down(x)))
            return x

    plain = Adapted()
    torch.save(plain.state_dict(), tmp_path / "model.pt")
    model = Adapted()
    model.load_state_dict(torch.load(tmp_path / "model.pt", mmap=mapped), assign=True)
    model.base.requires_grad_(False)
    plain.cuda()
    optimizers = [torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), 1e-2) for m in (plain, model)]
    budget = device_noun(torch.device("cuda")).context_bytes + (96 << 20)
    step = overspill.train_step(model, nn.MSELoss(), optimizers[1], device="cuda", budget=budget)
    for _ in range(4):
        x = torch.randn(64, 2048, device="cuda")
        optimizers[0].zero_grad()
        loss = nn.functional.mse_loss(plain(x), x)
        loss.backward()
        optimizers[0].step()
        assert torch.equal(step(x, x), loss)
    (plan,) = step.plans
    assert plan.model_on_host
    assert plan.reserved_bytes is not None
    assert plan.reserved_bytes < sum(p.nbytes for p in plain.parameters()) / 2
    step.close()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert other.device.type == "cpu"
        assert torch.equal(one.cpu(), other)
