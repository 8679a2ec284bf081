"""Any schedule that the reference machine accepts gives PyTorch's bits: by `compile` and by `train_step`, with both kinds of kernels.

What is captured once runs by many schedules drawn at random. Each moves the bytes that it says, leaves nothing in the
store, and stays within its peak. `test_exactness.py` of both folders have the policies, through all that users call.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from random import Random

import pytest
from tests.models.variants import MODELS, OWN, others_long
from tests.runtime.compiled.lowered import built_in, captured_step, check_schedule, moved_bytes
from tests.runtime.schedules import drawn
from tests.runtime.step.whole_steps import Cnn, Lm, Mlp, Pair, batch_for, cross_entropy, made, planned_peak
from torch import Tensor, nn

from overspill.core import Verb
from overspill.runtime.transfer.disk_store import DiskStore
from overspill.runtime.transfer.host_store import HostStore

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

MODELS_AND_SCHEDULES = [(Mlp, 6), *(pytest.param(model, 20, marks=pytest.mark.long) for model in (Mlp, Cnn, Lm))]
"""Most draws are the long suite's."""


class Loss(nn.Module):
    """A small model with its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.model, x, y)


@pytest.mark.parametrize("model", others_long("gpt2"))
def test_a_model_by_compile(model: str, tmp_path: Path) -> None:
    step, random = captured_step(*built_in(model)), Random(MODELS.index(model))
    for store in (HostStore(), HostStore(), DiskStore(tmp_path)):
        assert check_schedule(step, random, store) >= 0.98


@pytest.mark.short("bert-base")
@pytest.mark.parametrize("model", ["gpt2", pytest.param("bert-base", marks=pytest.mark.long)])
def test_a_model_by_compile_at_planned_addresses(model: str) -> None:
    step, random = captured_step(*built_in(model)), Random(1)
    for _ in range(3):
        check_schedule(step, random, HostStore(), in_arena=True)


@pytest.mark.parametrize(("model", "scratch_bytes"), [(Mlp, 0), pytest.param(Lm, 4096, marks=pytest.mark.long)])
def test_a_small_model_by_train_step_at_planned_addresses(model: type[nn.Module], scratch_bytes: int) -> None:
    with drawn(0) as policy:
        pair = Pair(model, options={"policy": policy, "placement": "planned", "budget": "4MiB"})
        check_steps(pair, 6, scratch_bytes)


@pytest.mark.long
@pytest.mark.parametrize("model", OWN)
def test_a_model_by_compile_with_inductor(model: str) -> None:
    step, random = captured_step(*built_in(model), "inductor"), Random(MODELS.index(model))
    for _ in range(20):
        assert check_schedule(step, random, HostStore()) >= 0.95


@pytest.mark.long
@pytest.mark.parametrize(("model", "schedules"), MODELS_AND_SCHEDULES)
def test_a_small_model_by_compile_with_inductor(model: type[nn.Module], schedules: int) -> None:
    module = made(model)
    step, random = captured_step(Loss(module), batch_for(module, 32), "inductor"), Random(0)
    for _ in range(schedules):
        assert check_schedule(step, random, HostStore()) >= 0.95


def check_steps(pair: Pair, schedules: int, scratch_bytes: int = 0) -> None:
    """Two steps by each of some schedules, of a step that is captured once; its kernels take `scratch_bytes` besides."""
    pair.step._plans._captures.capture = cache(pair.step._plans._captures.capture)
    for _ in range(schedules):
        pair.step._plans.clear()
        pair.train()  # it begins where the schedule before has left the weights
        engine = pair.step.engine
        before = engine.offloaded_bytes, engine.prefetched_bytes
        assert pair.measured_peak() <= planned_peak(pair.step) + scratch_bytes
        if len(pair.step.plans) == 1:
            (plan,) = pair.step.plans
            out, back = (moved_bytes(plan.graph, plan.schedule, verb) for verb in (Verb.OFFLOAD, Verb.PREFETCH))
            assert (engine.offloaded_bytes, engine.prefetched_bytes) == (before[0] + out, before[1] + back)
            assert engine.stored_count == len(plan.schedule.stored)
    pair.assert_same()
    pair.step.close()


@pytest.mark.parametrize(("model", "schedules"), MODELS_AND_SCHEDULES)
def test_a_small_model_by_train_step(model: type[nn.Module], schedules: int) -> None:
    with drawn(0) as policy:
        check_steps(Pair(model, options={"policy": policy}), schedules)


def test_micro_batches_by_train_step() -> None:
    with drawn(0) as policy:
        check_steps(Pair(gradients={"accumulate": 2, "clip_norm": 0.5}, options={"policy": policy}), 2)


@pytest.mark.parametrize(("model", "schedules"), MODELS_AND_SCHEDULES)
def test_a_small_model_by_train_step_with_inductor(model: type[nn.Module], schedules: int) -> None:
    with drawn(0) as policy:
        check_steps(
            Pair(model, size=32, options={"policy": policy, "backend": "inductor", "partition": 1.0}), schedules
        )


@pytest.mark.long
def test_a_small_model_by_train_step_with_inductor_at_planned_addresses() -> None:
    with drawn(0) as policy:
        given = {"policy": policy, "backend": "inductor", "partition": 1.0, "placement": "planned", "budget": "4MiB"}
        check_steps(Pair(Mlp, size=32, options=given), 6)
