"""The CUDA path on a real device: pinned memory, two copy streams, exact numbers, planned peak. Skipped without one."""

import pytest
import torch

from overspill.models import load
from overspill.policies import POLICIES
from overspill.runtime.options import Options
from overspill.runtime.training import Training, train, train_plain
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.stores import make_store

pytestmark = pytest.mark.gpu


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
    job = Training(lambda: load(model, small=True), 4, "momentum", 3, device="cuda")
    managed = train(job, Options(budget="4GiB", policy=policy))
    assert managed.identical_to(train_plain(job, Options()))


def test_a_budget_halves_the_allocated_peak_of_resnet50(deterministic) -> None:
    job = Training(lambda: load("resnet50"), 32, "sgd", 2, device="cuda")
    managed, plain = train(job, Options(budget=0.5)), train_plain(job, Options())
    assert managed.losses == plain.losses
    assert managed.plan is not None
    assert managed.plan.offloaded_bytes > 0
    assert managed.measured_peak_bytes < 0.75 * plain.measured_peak_bytes  # kernels' workspaces come on top of the plan
