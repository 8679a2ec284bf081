"""Estimates of compiled steps: the peak of stock torch.compile as the allocator counts it, with nothing compiled."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.async_compile import AsyncCompile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

import overspill
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.estimation import programs
from overspill.job import Job
from overspill.models import BuiltModel, load
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.training import train, train_plain

BATCH = 4
CONVOLUTIONS = (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default)


class Net(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.dropout(torch.relu(self.norm(self.first(x))), 0.1, self.training))


def net(width: int = 64) -> BuiltModel:
    return BuiltModel(
        "net", Net(width), lambda n: (torch.randn(32 * n, 16), torch.randint(8, (32 * n,))),
        lambda model, x, y: nn.functional.cross_entropy(model(x), y),
    )  # fmt: skip


def estimated_peak(build: Any, optimizer: str = "sgd") -> int:
    """Of the compiled step as tensors alone, without a GPU's workspaces."""
    program = programs.program_of(Job(build, BATCH, optimizer), compiled=True)
    return record(program).peak_requested_bytes


def measured_peak(build: Any, optimizer: str = "sgd") -> int:
    """Of real training with stock torch.compile, by the events of PyTorch's allocator."""
    return train_plain(Job(build, BATCH, optimizer), Options(backend="inductor")).measured_peak_bytes


@pytest.mark.long
def test_the_peak_is_that_of_stock_torch_compile() -> None:
    assert estimated_peak(net, "momentum") == measured_peak(net, "momentum")


class WithWorkspaces(TorchDispatchMode):
    """Takes while a convolution runs what the CPU's library took when it was really run, once, on zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in CONVOLUTIONS:
            with _disable_current_modes(), torch.no_grad():
                given = tree_map_only(torch.Tensor, zeros_like_fake, args)
                with allocations() as found:
                    real = func(*given)
                del real
            most, left = peak_of(found.changes)
            torch.empty_strided((max(most - left, 0),), (1,), dtype=torch.uint8, device="cuda")
        return result


def zeros_like_fake(value: torch.Tensor) -> torch.Tensor:
    whole = torch.zeros(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype)
    return whole.as_strided(tuple(value.shape), value.stride(), value.storage_offset())


@pytest.fixture
def with_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    placing = Recorder.placing

    @contextmanager
    def measuring(self: Recorder, *, on_device: bool) -> Iterator[None]:
        with placing(self, on_device=on_device), WithWorkspaces():
            yield

    monkeypatch.setattr(Recorder, "placing", measuring)


@pytest.mark.long
@pytest.mark.usefixtures("with_workspaces")
@pytest.mark.parametrize("model", ["gpt2", "bert-base", "lstm", "seq2seq", "resnet18", "unet", "alexnet"])
def test_the_peak_of_every_kind_of_model_is_that_of_stock_torch_compile(model: str) -> None:
    build = partial(load, model, small=True)
    assert estimated_peak(build) == measured_peak(build)


@pytest.mark.long
def test_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cpp", "cpp_pybinding", "triton"):
        monkeypatch.setattr(AsyncCompile, name, None)
    assert estimated_peak(net) > 0


@pytest.mark.long
def test_a_compilation_after_an_estimate_is_whole() -> None:
    assert estimated_peak(net) > 0
    model = Net().eval()
    x = torch.randn(32 * BATCH, 16)
    with torch.no_grad():
        assert torch.allclose(torch.compile(model, dynamic=False)(x), model(x), atol=1e-5)


@pytest.mark.long
def test_weights_take_no_memory() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = overspill.estimate(
        lambda: nn.Sequential(nn.Linear(1 << 16, 1 << 16), nn.ReLU(), nn.Linear(1 << 16, 1)),
        torch.randn(8, 1 << 16), lambda model, x: model(x).mean(), "sgd", compiled=True,
    )  # fmt: skip
    assert answer.compiled is not None
    assert answer.compiled.breakdown["weights"] > 16 << 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4 << 20  # KiB


@pytest.mark.long
def test_inference_in_low_precision_and_accumulation() -> None:
    module, x, y = Net(), torch.randn(64, 16), torch.randint(8, (64,))
    inference = overspill.estimate(module, x, compiled=True)
    assert inference.compiled is not None
    assert inference.compiled.peak_requested_bytes <= inference.peak_requested_bytes
    plain, low = (
        overspill.estimate(module, (x, y), nn.CrossEntropyLoss(), "adamw", dtype=dtype, accumulate=2, compiled=True)
        for dtype in ("float32", "bfloat16")
    )
    assert plain.compiled is not None
    assert low.compiled is not None
    assert 2 * low.compiled.breakdown["weights"] == plain.compiled.breakdown["weights"]
    assert plain.on("rtx4090").compiled.device.name == "rtx4090"  # type: ignore[union-attr]
    assert "with torch.compile" in plain.explain()
    assert overspill.estimate(module, x).compiled is None
    assert all(p.device.type == "cpu" and p.abs().sum() >= 0 for p in module.parameters())


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return self.layer(x)


def test_what_is_not_known_is_refused_in_a_line() -> None:
    x = torch.randn(4, 16)
    with pytest.raises(RequestError, match="not with autocast"):
        overspill.estimate(Net(), x, compiled=True, dtype="amp")
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(UnsupportedError, match="no Python program"):
        overspill.estimate(Net(), x, compiled=True)
    with pytest.raises(UnsupportedError, match=r"one graph"):
        overspill.estimate(Branching(), x, compiled=True)


# --- Within a budget --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_plan_is_that_of_the_run() -> None:
    job = Job(net, BATCH, "momentum")
    options = Options("smallest", backend="inductor", store="host")
    foretold, run = preview(job, options), train(job, options)
    assert foretold.peak_bytes == run.planned_peak_bytes


@pytest.mark.long
def test_a_plan_from_python_and_a_budget_below_the_floor() -> None:
    given = (lambda: Net(4096), (torch.randn(64, 16), torch.randint(8, (64,))), nn.CrossEntropyLoss(), "sgd")
    plan = overspill.plan(*given, budget="100%", device="rtx4090", backend="inductor")
    assert plan.peak_bytes == plan.unmanaged_peak_bytes <= plan.budget_bytes  # of a card, all is in it
    assert plan.slowdown == 1
    assert plan.needed_bytes <= plan.asked_bytes
    with pytest.raises(InfeasibleBudgetError, match="is too small"):
        overspill.plan(*given, budget="1KiB", device="rtx4090", backend="inductor")
