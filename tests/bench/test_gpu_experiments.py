"""What the campaign's experiments compute, as far as a CPU can tell: each notices what it is there to notice."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from overspill.core.errors import InfeasibleBudgetError
from overspill.models.resnet import Residual
from overspill.runtime.training import Run
from overspill.runtime.transfer.host_store import HostStore

BENCH = Path(__file__).parents[2] / "bench"
TOPICS = ("bits", "jobs", "kernels", "link", "round_trips", "steps", "ways")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    for name in [n for n in sys.modules if n.split(".")[0] == "gpu"]:
        monkeypatch.delitem(sys.modules, name)
    for name in TOPICS:
        importlib.import_module(f"gpu.topics.{name}")
    return importlib.import_module("gpu")


@pytest.fixture
def small(gpu: ModuleType):
    return gpu.experiment.Setting("cpu", small=True)


def test_a_profile_tells_kernels_copies_their_overlap_and_idle_time_apart(gpu: ModuleType) -> None:
    found = gpu.topics.kernels.gpu_figures(
        [
            ("gemm", 0.0, 10.0),
            ("gemm", 5.0, 20.0),  # on another stream
            ("Memcpy DtoH (Device -> Pinned)", 15.0, 30.0),
            ("Memcpy HtoD (Pinned -> Device)", 40.0, 60.0),
            ("Memcpy DtoD (Device -> Device)", 50.0, 55.0),  # a kernel as any other
        ]
    )
    assert (found["kernels"], found["copies"]) == (3, {"HtoD": 1, "DtoH": 1})
    assert found["kernel_busy_seconds"] == pytest.approx(25e-6)
    assert found["copy_busy_seconds"] == pytest.approx({"HtoD": 20e-6, "DtoH": 15e-6})
    assert found["copies_beside_kernels_seconds"] == pytest.approx(10e-6)
    assert found["span_seconds"] == pytest.approx(60e-6)
    assert found["idle_seconds"] == pytest.approx(10e-6)
    assert found["kernel_micros"] == {"gemm": 25.0, "Memcpy DtoD (Device -> Device)": 5.0}
    assert gpu.topics.kernels.gpu_figures([])["span_seconds"] == 0.0


def test_a_batch_is_halved_until_plain_training_should_fit(gpu: ModuleType) -> None:
    job = gpu.topics.jobs.Job("resnet50", 256, needs_bytes=32 << 30)
    batches = [job.batch_on(gpu.experiment.Setting("cuda", memory_bytes=gib << 30)) for gib in (80, 32, 24, 8)]
    assert batches == [256, 256, 128, 64]
    assert job.batch_on(gpu.experiment.Setting("cuda")) == 256


def test_a_round_trip_that_brings_other_bytes_is_noticed(
    gpu: ModuleType, small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.topics.round_trips, "TRIPS", 8)
    assert gpu.topics.round_trips.trips(small, late=False)["wrong"] == 0
    read, count = HostStore.read, [0]

    def third_is_wrong(self: HostStore, slot: object, target: torch.Tensor) -> None:
        read(self, slot, target)
        count[0] += 1
        if count[0] == 3:
            target.view(-1)[-1] += 1

    monkeypatch.setattr(HostStore, "read", third_is_wrong)
    assert gpu.topics.round_trips.trips(small, late=False)["wrong"] == 1


def test_bits_name_the_first_tensor_that_differs(gpu: ModuleType) -> None:
    plain = Run(losses=[1.0], state={"a": torch.zeros(3), "b": torch.ones(3), "c": torch.ones(3)})
    other = Run(losses=[1.0], state={"a": torch.zeros(3), "b": torch.ones(3) + 0.25, "c": torch.zeros(3)})
    found = gpu.topics.bits._difference(other, plain)
    assert not found["identical"]
    assert (found["differing_tensors"], found["first_differing"], found["its_largest_difference"]) == (2, "b", 0.25)
    assert gpu.topics.bits._difference(plain, plain)["identical"]
    negative = Run(losses=[1.0], state=plain.state | {"a": -torch.zeros(3)})
    assert gpu.topics.bits._difference(negative, plain)["first_differing"] == "a"


def test_batch_norm_by_native_kernels_has_the_same_numbers_here_and_is_taken_back(gpu: ModuleType) -> None:
    theirs = torch.nn.functional.batch_norm
    norm, x = torch.nn.BatchNorm2d(3), torch.randn(4, 3, 5, 5)
    expected = norm(x)
    with gpu.topics.bits._native_batch_norm():
        assert torch.nn.functional.batch_norm is not theirs
        assert torch.equal(norm(x), expected)
    assert torch.nn.functional.batch_norm is theirs


def test_checkpoints_are_around_every_block(gpu: ModuleType, small, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [0]
    forward = Residual.forward

    def counted(self: Residual, x: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return forward(self, x)

    monkeypatch.setattr(Residual, "forward", counted)
    losses = {}
    for name in ("eager", "checkpoint"):
        built = gpu.topics.jobs.build(small, gpu.topics.jobs.Job("resnet18", 4))
        blocks = sum(isinstance(m, Residual) for m in built.step.modules())
        runs[0] = 0
        losses[name] = gpu.topics.ways.WAYS[name](built).step().item()
        assert runs[0] == blocks * (2 if name == "checkpoint" else 1)
    assert losses["eager"] == losses["checkpoint"]


def test_a_budget_is_the_card_of_the_peer_and_a_refusal_is_an_answer(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: object, budget: int) -> None:
        raise InfeasibleBudgetError("made up", budget_bytes=budget, floor_bytes=budget + 1, cause="")

    monkeypatch.setitem(gpu.topics.ways.WAYS, "overspill", refused)
    peer = {"reserved_peak_bytes": 1000, "first_steps_peaks": {"reserved_peak_bytes": 3000}}
    setting = gpu.experiment.Setting("cpu", small=True, earlier={"6-gpt2-checkpoint": peer})
    found = gpu.topics.steps.step_time(setting, "gpt2", "overspill", at="6-gpt2-checkpoint")
    assert (found["outcome"], found["budget_bytes"]) == (gpu.topics.jobs.INFEASIBLE, 3000)
    with pytest.raises(gpu.experiment.Waiting, match="6-gpt2-save-on-cpu"):
        gpu.topics.steps.step_time(setting, "gpt2", "overspill", at="6-gpt2-save-on-cpu")


def test_slow_steps_are_fewer(gpu: ModuleType, small, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = [0]

    def step() -> torch.Tensor:
        calls[0] += 1
        return torch.tensor(1.0)

    monkeypatch.setattr(gpu.topics.jobs, "MOST_SECONDS", 0.0)
    found = gpu.topics.jobs.timed(small, step)
    assert calls[0] == gpu.topics.jobs.WARM_UP_STEPS + 2 * gpu.topics.jobs.LEAST_STEPS
    assert small.noted["losses"] == [1.0] * gpu.topics.jobs.WARM_UP_STEPS
    assert found["host_seconds"] > 0
