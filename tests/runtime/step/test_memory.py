"""What a whole step has on the device is what its plan says, from the first step on and between micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import CPU, OPTIMIZERS, Lm, Mlp, Pair, planned_peak
from tests.turns import by_turns
from torch import Tensor, nn

import overspill
from overspill.core import TensorKind, Verb
from overspill.core.errors import InfeasibleBudgetError
from overspill.runtime.step.updates import SCALAR_BYTES
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.host_store import HostStore


def wide() -> nn.Module:
    return Mlp(200)


def on_device(pair: Pair) -> list[Tensor]:
    """All tensors of the job that have bytes now."""
    kept = [v for of in pair.optimizer.state.values() for v in dict.values(of) if isinstance(v, Tensor)]
    parameters = [p for m in pair.model.modules() for p in dict.values(m._parameters) if p is not None]
    return [*parameters, *pair.model.buffers(), *kept, *pair.inputs]


@pytest.mark.short("momentum-4")
@pytest.mark.parametrize(("optimizer", "accumulate"), by_turns(["adamw", "momentum"], [1, 4]))
def test_the_whole_call_stays_within_the_plan_and_near_it(optimizer: str, accumulate: int) -> None:
    pair = Pair(wide, OPTIMIZERS[optimizer], {"accumulate": accumulate, "clip_norm": 1.0})
    pair.train()
    pair.step.tracker = None
    for _ in range(2):
        watched = LiveBytes(CPU)
        watched.add(on_device(pair))
        with watched:
            pair.step(*pair.inputs)
        small = 32 * len(on_device(pair)) + SCALAR_BYTES  # placeholders and handles
        assert 0.98 * planned_peak(pair.step) - small <= watched.peak_bytes <= planned_peak(pair.step) + small


def test_a_model_larger_than_its_budget_is_trained_from_the_first_step_on() -> None:
    pair = Pair(wide)
    pair.train(2)
    parameters = sum(p.numel() * p.element_size() for p in pair.plain.model.parameters())
    assert planned_peak(pair.step) < 2.5 * parameters  # there are four such: with gradients and two moments
    assert planned_peak(pair.step) < 0.6 * pair.step.plans[0].unmanaged_peak_bytes
    assert pair.step.tracker is not None
    assert pair.step.tracker.peak_bytes <= planned_peak(pair.step)
    pair.assert_same()


@pytest.mark.long
def test_state_that_the_last_micro_batch_has_on_the_device_counts_in_those_before() -> None:
    with pytest.raises(InfeasibleBudgetError) as refusal:
        Pair(wide, options={"budget": "1B"}).train()
    pair = Pair(wide, gradients={"accumulate": 2}, options={"budget": int(1.6 * refusal.value.floor_bytes)})
    pair.train(2)
    last, before = pair.step.plans
    names = {t.name for t in last.graph.tensors if t.kind is TensorKind.OPTIMIZER_STATE and t.movable}
    stored = {last.graph.tensors[t].name for t in last.schedule.stored}
    staying = sum(t.nbytes for t in last.graph.tensors if t.name in names - stored)
    assert staying > 0
    assert staying in {t.nbytes for t in before.graph.tensors if t.kind is TensorKind.OPTIMIZER_STATE}
    assert before.budget_bytes == last.budget_bytes
    assert pair.step.tracker is not None
    assert pair.step.tracker.peak_bytes <= planned_peak(pair.step)


def test_inputs_of_all_micro_batches_count_in_each() -> None:
    pair = Pair(Mlp, OPTIMIZERS["sgd"], {"accumulate": 4}, {"policy": "liveness", "budget": "1GiB"})
    pair.train()
    nbytes = sum(t.numel() * t.element_size() for t in pair.inputs)
    for plan in pair.step.plans:
        assert plan.graph.bytes_of(TensorKind.INPUT) == nbytes


@pytest.mark.long
def test_what_is_only_read_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Lm)
    pair.train()
    written: list[int] = []
    real = HostStore.write
    monkeypatch.setattr(HostStore, "write", lambda self, slot, source: (written.append(1), real(self, slot, source)))
    pair.train(2)
    (plan,) = pair.step.plans
    offloads = plan.schedule.targets(Verb.OFFLOAD)
    assert len(written) == 2 * len(offloads)
    persistent = [t for t in offloads if plan.graph.tensors[t].persistent]
    assert len(persistent) == len(set(persistent))  # once a step
    changed = {t for op in plan.graph.ops for t in op.writes}
    assert set(persistent) <= changed


@pytest.mark.long
def test_the_store_does_not_grow_after_the_first_step() -> None:
    pair = Pair(wide, gradients={"accumulate": 2})
    pair.train()
    assert pair.step.engine is not None
    store = pair.step.engine.store
    before: Any = (store.capacity_bytes, store.used_bytes)
    pair.train(3)
    assert (store.capacity_bytes, store.used_bytes) == before
    assert pair.step.engine.stored_count == len(pair.step._state.residency.away()) - len(
        [n for n in pair.step._state.residency.away() if pair.step._state.residency[n].handle is None]
    )
    pair.step.close()
    assert torch.equal(pair.model.last.weight, pair.plain.model.last.weight)


def test_state_that_a_step_does_not_update_has_room_or_lies_in_the_store() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = nn.Linear(12, 64)
            self.heads = nn.ModuleList(nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))) for _ in range(3))

    def loss(model: Any, x: Tensor, head: Tensor) -> Tensor:
        return model.heads[len(head)](model.trunk(x).relu()).square().mean()

    for budget, idle in ((0.7, True), ("1GiB", False)):
        pair = Pair(Heads, options={"budget": budget, "policy": "auto"}, loss_fn=loss)
        for head in (0, 1, 2, 0):
            inputs = torch.randn(8, 12), torch.zeros(head)
            watched = LiveBytes(CPU)
            watched.add([*on_device(pair), *inputs])
            pair.step.tracker = watched
            pair.train(inputs=inputs)
            assert watched.peak_bytes <= pair.step.plans[0].budget_bytes
        state = [name for name in pair.step._state.residency.away() if "heads.1.0.weight.exp" in name]
        assert bool(state) is idle
        pair.assert_same()


@pytest.mark.long
def test_sums_of_gradients_go_with_the_weights_that_are_frozen() -> None:
    pair = Pair(wide, gradients={"accumulate": 2})
    for turn in (0, 1, 0):
        for model in (pair.plain.model, pair.model):
            for i, layer in enumerate(model.middle.children()):
                layer.requires_grad_(i == turn)
        pair.train()
        state = pair.step._state
        there = {name.removesuffix(".grad") for name in state.sums if not state.residency[name].away}
        assert there <= {f"model.{name}" for name, p in pair.model.named_parameters() if p.requires_grad}
    pair.assert_same()


def test_a_share_is_of_the_largest_step_so_far() -> None:
    models = [nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.ReLU()))) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    plain, optimizer = models[0], OPTIMIZERS["adamw"](models[0].parameters())
    step = overspill.train_step(
        models[1], nn.MSELoss(), OPTIMIZERS["adamw"](models[1].parameters()), budget=0.6, store="host"
    )
    budgets = []
    for rows in (4, 2000, 4, 8, 2000):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        loss = nn.functional.mse_loss(plain(x), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step(x, x), loss.detach())
        budgets.append({plan.budget_bytes for plan in step.plans})
    first, whole = budgets[0].pop(), max(plan.unmanaged_peak_bytes for plan in step.plans)
    assert first < 0.7 * whole
    assert budgets[1:] == [{int(0.6 * whole)}] * 4
    assert len(step.plans) == 3
