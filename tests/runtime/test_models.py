"""Built-in models within a budget, by `compile` and `train_step`: plain PyTorch's bits, or stock torch.compile's, and the planned peak."""

from __future__ import annotations

from functools import cache, partial
from itertools import product

import pytest
import torch
import torch._dynamo.config
import torch._functorch.config
from tests.models.variants import OWN

from overspill.core import Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.job import Job
from overspill.models import load
from overspill.runtime.options import Options
from overspill.runtime.preview import preview
from overspill.runtime.training import Run, train, train_plain

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

VARIED = "seq2seq-varied"
"""A model whose batches differ in shape, each of which is compiled, the last one's while bytes are counted."""
SHORT = {("alexnet", False, "eager"), ("alexnet", True, "eager")}
"""The rest is the long suite's; `test_schedules.py` and `test_dtypes.py` train further models."""
Kernels = partial(Options, store="host", backend="inductor")
by_both = pytest.mark.parametrize("whole_step", [False, True], ids=["compile", "train_step"])


def training(model: str, optimizer: str = "momentum", accumulate: int = 1) -> Job:
    return Job(partial(load, model, small=True), 4 // accumulate, optimizer, accumulate=accumulate)


@cache
def stock(model: str, optimizer: str, whole_step: bool, backend: str = "inductor") -> Run:
    with torch._dynamo.config.patch(allow_rnn=whole_step):
        return train_plain(training(model, optimizer), Options(backend=backend, whole_step=whole_step))


def checked(model: str, optimizer: str, budget: str, whole_step: bool, backend: str = "inductor") -> Run:
    """A run within `budget`, or the smallest that works; it equals the stock one and keeps the budget."""
    job, partition = training(model, optimizer), 1 if backend == "inductor" else None
    options = partial(Options, store="host", backend=backend, partition=partition, whole_step=whole_step)
    try:
        run = train(job, options(budget))
    except InfeasibleBudgetError as error:
        run = train(job, options(error.floor_bytes))
    assert run.plan is not None
    assert run.identical_to(stock(model, optimizer, whole_step, backend))
    assert run.measured_peak_bytes <= run.plan.budget_bytes
    room = max((0.05 if whole_step else 0.02) * run.planned_peak_bytes, 20_000)
    assert 0 <= run.planned_peak_bytes - run.measured_peak_bytes <= room
    return run


@pytest.mark.parametrize(
    ("model", "whole_step", "backend"),
    [
        pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
        for case in product(OWN, (False, True), ("eager", "inductor"))
    ],
)
def test_every_model_trains_with_the_bits_of_stock_pytorch(model: str, whole_step: bool, backend: str) -> None:
    checked(model, "momentum", "70%", whole_step, backend)


@pytest.mark.long
@pytest.mark.parametrize(("whole_step", "optimizer"), [(False, "momentum"), (True, "adamw")])
def test_a_transformer_trains_in_much_less_memory(whole_step: bool, optimizer: str) -> None:
    run = checked("gpt2", optimizer, "smallest", whole_step)
    assert run.plan is not None
    assert run.offloaded_bytes > 0
    assert run.plan.schedule.targets(Verb.RECOMPUTE) or not whole_step
    assert run.measured_peak_bytes < 0.7 * run.plan.unmanaged_peak_bytes


@pytest.mark.long
@by_both
@pytest.mark.filterwarnings("ignore:a profiler runs")
def test_a_model_of_varied_batches_trains_with_the_bits_of_torch_compile(whole_step: bool) -> None:
    options = Kernels("1MiB", partition=1, whole_step=whole_step)
    assert train(training(VARIED), options).identical_to(stock(VARIED, "momentum", whole_step))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "whole_step", "accumulate"),
    [("gpt2", False, 1), ("resnet18", False, 1), ("resnet18", True, 1), ("gpt2", True, 2)],
)
def test_another_partition_gives_the_bits_of_torch_compile_with_its_setting(
    model: str, whole_step: bool, accumulate: int
) -> None:
    job, options = training(model, accumulate=accumulate), partial(Kernels, whole_step=whole_step)
    run = train(job, options("smallest"))
    assert run.partition is not None
    assert run.identical_to(train_plain(job, options(), partition=run.partition))
    assert run.plan is not None
    assert run.measured_peak_bytes <= run.plan.budget_bytes


@pytest.mark.long
def test_the_partition_that_the_user_has_set_is_taken() -> None:
    job = training("gpt2")
    tried = train(job, Kernels("smallest"))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        run = train(job, Kernels("smallest"))
    assert run.partition == 0.5
    assert tried.plan is not None
    assert run.plan is not None
    assert tried.plan.budget_bytes <= run.plan.budget_bytes


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt2", "resnet18", "unet", "lstm"])
def test_the_arena_keeps_the_budget(model: str) -> None:
    job, placed = training(model), partial(Kernels, placement="planned")
    with pytest.raises(InfeasibleBudgetError) as error:
        train(job, placed("1B"))
    for budget in (error.value.floor_bytes, int(1.1 * error.value.floor_bytes)):
        run = train(job, placed(budget))
        assert run.identical_to(stock(model, "momentum", False))
        assert run.measured_peak_bytes <= budget


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "partition", "whole_step", "budget"),
    [
        ("eager", None, True, "70%"),
        ("inductor", 1, True, "70%"),
        ("eager", None, False, 1_900_000),
        ("inductor", 1, False, 1_900_000),
    ],
)
def test_a_preview_is_the_plan_of_the_run(
    backend: str, partition: float | None, whole_step: bool, budget: str | int
) -> None:
    job = training("gpt2")
    options = Options(budget, store="host", backend=backend, partition=partition, whole_step=whole_step)
    seen, run = preview(job, options), train(job, options).plan
    assert run is not None
    assert whole_step or seen.schedule.stored
    assert seen.schedule.instructions == run.schedule.instructions
    assert (seen.peak_bytes, seen.budget_bytes) == (run.peak_bytes, run.budget_bytes)
