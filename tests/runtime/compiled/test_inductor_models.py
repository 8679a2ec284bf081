"""Built-in models with Inductor's own kernels within a budget: the bits of stock torch.compile, and the peak that was planned."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
import torch._functorch.config
import torch._inductor.config

from overspill.core import Verb
from overspill.core.errors import InfeasibleBudget
from overspill.job import Job
from overspill.models import load, names
from overspill.runtime import training as runs
from overspill.runtime.options import Options
from overspill.runtime.training import Run

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

STEPS = 3


def training(model: str, optimizer: str) -> Job:
    return Job(partial(load, model, small=True), 4, optimizer)


train, train_plain = partial(runs.train, steps=STEPS), partial(runs.train_plain, steps=STEPS)


@cache
def stock(model: str, optimizer: str) -> Run:
    return train_plain(training(model, optimizer), Options(backend="inductor"))


def checked(model: str, optimizer: str, policy: str, store: str, share: float = 0.5) -> Run:
    """A run at `share` of what can be saved; it equals stock torch.compile and keeps its budget."""
    plain = stock(model, optimizer)
    floor = smallest(model, optimizer, policy)
    budget = floor + int(share * max(0, plain.measured_peak_bytes - floor))
    run = train(training(model, optimizer), Options(budget, policy, store, backend="inductor"))
    assert run.plan is not None
    assert run.identical_to(plain)
    if policy == "auto":
        assert run.measured_peak_bytes <= budget
    assert run.planned_peak_bytes >= run.measured_peak_bytes
    assert run.planned_peak_bytes - run.measured_peak_bytes <= max(0.02 * run.planned_peak_bytes, 20_000)
    return run


@cache
def smallest(model: str, optimizer: str, policy: str) -> int:
    try:
        train(training(model, optimizer), Options(1, policy, "host", backend="inductor"))
    except InfeasibleBudget as error:
        return int(error.floor_bytes)
    return stock(model, optimizer).measured_peak_bytes  # a policy that does not plan for a budget


@pytest.mark.long
def test_a_transformer_trains_with_the_bits_of_torch_compile_in_less_memory() -> None:
    run = checked("gpt2", "momentum", "auto", "host", share=0.0)
    assert run.offloaded_bytes > 0
    assert run.measured_peak_bytes < 0.7 * stock("gpt2", "momentum").measured_peak_bytes


@pytest.mark.long
def test_what_is_recomputed_is_identical_too() -> None:
    run = checked("gpt2", "adamw", "checkpoint-cost", "host")
    assert run.plan is not None
    assert run.plan.schedule.targets(Verb.RECOMPUTE)


VARIED = "seq2seq-varied"
"""A model whose batches differ in shape, each of which is compiled, the last one's while bytes are counted."""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:a profiler runs")
def test_a_model_of_varied_batches_trains_with_the_bits_of_torch_compile() -> None:
    options = Options("1MiB", "auto", "host", backend="inductor", partition=1.0)
    assert train(training(VARIED, "momentum"), options).identical_to(stock(VARIED, "momentum"))


@pytest.mark.long
@pytest.mark.parametrize("model", [name for name in names() if name != VARIED])
def test_every_model_trains_with_the_bits_of_torch_compile(model: str) -> None:
    checked(model, "momentum", "auto", "host")


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt2", "resnet18"])
def test_another_partition_gives_the_bits_of_torch_compile_with_its_setting(model: str) -> None:
    job = training(model, "momentum")
    run = train(job, Options("smallest", store="host", backend="inductor"))
    assert run.partition is not None
    assert run.plan is not None
    assert run.identical_to(train_plain(job, Options(backend="inductor"), partition=run.partition))
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        floor = smallest.__wrapped__(model, "momentum", "auto")
        mine = train(job, Options(floor, store="host", backend="inductor"))
    assert mine.partition == 0.5, "what the user has set is what is used"
    assert run.plan.budget_bytes <= floor


@pytest.mark.long
@pytest.mark.parametrize("model", ["gpt2", "resnet18", "unet", "lstm"])
def test_the_arena_keeps_the_budget(model: str) -> None:
    plain = stock(model, "momentum")
    job = training(model, "momentum")
    with pytest.raises(InfeasibleBudget) as error:
        train(job, Options(1, "auto", "host", backend="inductor", placement="planned"))
    for budget in (error.value.floor_bytes, int(1.1 * error.value.floor_bytes)):
        run = train(job, Options(budget, "auto", "host", backend="inductor", placement="planned"))
        assert run.identical_to(plain)
        assert run.measured_peak_bytes <= budget
