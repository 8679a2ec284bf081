"""A whole step with Inductor's kernels: the bits of stock torch.compile and the optimizer, and the peak that was planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from tests.runtime.step.whole_steps import (
    OPTIMIZERS,
    SMALLEST,
    Cnn,
    Lm,
    Mlp,
    Pair,
    batch_for,
    cross_entropy,
    made,
    planned_peak,
)
from torch import Tensor, nn

import overspill
from overspill.core.errors import InfeasibleBudgetError, RequestError, StoreError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.train_step import TrainStep


def compiled(
    model: Callable[[], nn.Module] = Mlp,
    optimizer: str = "adamw",
    gradients: dict[str, Any] | None = None,
    loss_fn: Callable[..., Any] = cross_entropy,
    **options: Any,
) -> Pair:
    options = {"policy": "auto", "backend": "inductor", "partition": 1.0} | options
    return Pair(model, OPTIMIZERS[optimizer], gradients or {}, options, loss_fn, size=32)


def assert_within_budget(pair: Pair) -> None:
    """One more step, whose peak by the allocator's own events is within the budget, and nearly the planned one."""
    measured, planned = pair.measured_peak(), planned_peak(pair.step)
    assert measured <= planned <= pair.step.plans[0].budget_bytes
    assert planned - measured <= 0.2 * planned


@pytest.mark.long
def test_a_model_that_is_changed_between_steps_is_compiled_anew() -> None:
    pair = compiled(optimizer="momentum", policy="window")
    pair.train()
    for model in (pair.plain.model, pair.model):
        model.drop.p = 0.4
        model.act = nn.GELU()
    pair.compile()
    pair.train(2)
    pair.assert_same()
    assert len(pair.step.plans) == 2


@pytest.mark.long
def test_what_inductor_cannot_plan_is_refused_in_a_line() -> None:
    def step(loss_fn: Callable[..., Any] = cross_entropy, **how: Any) -> TrainStep:
        model = made()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return overspill.train_step(model, loss_fn, optimizer, **({"backend": "inductor"} | how))

    inputs = batch_for(Mlp())
    with torch._inductor.config.patch(cpp_wrapper=True), pytest.raises(UnsupportedError, match='use backend="eager"'):
        step()(*inputs)
    with pytest.raises(UnsupportedError, match="reads values"):
        step(lambda model, x, y: cross_entropy(model, x, y) * model(x).sum().item())(*inputs)
    with pytest.raises(InfeasibleBudgetError, match="minimum of policy"):
        step(budget="1KiB")(*inputs)
    with pytest.raises(RequestError, match="unknown backend"):
        step(backend="other")


# --- Slow: everything that a step does --------------------------------------------------------------------------------


MODELS = (Mlp, Cnn, Lm)
CASES = [
    pytest.param(MODELS[(i + j) % 3], optimizer, gradients, id=f"{optimizer}-{gradients}")  # on the models by turns
    for i, optimizer in enumerate(["adamw", "momentum", "adamw, foreach", "adafactor"])
    for j, gradients in enumerate([{}, {"clip_norm": 0.1}, {"clip_value": 0.01}, {"accumulate": 2, "clip_norm": 1.0}])
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "optimizer", "gradients"), CASES)
def test_gradients_and_optimizers(model: type[nn.Module], optimizer: str, gradients: dict[str, Any]) -> None:
    pair = compiled(model, optimizer, gradients)
    pair.train(3)
    # Adafactor's scalars, made within ops, take some hundred bytes more than any dispatch mode sees. Comparing comes
    # last: it brings all that is in the store back.
    if optimizer != "adafactor":
        assert_within_budget(pair)
    pair.assert_same()


def with_outputs(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output = model(x)
    return nn.functional.cross_entropy(output, y), output, x[:2]


@pytest.mark.long
def test_other_tensors_that_the_loss_function_returns() -> None:
    pair = compiled(loss_fn=with_outputs)
    detached = torch.compile(lambda *given: tuple(t if t.dim() == 0 else t.detach() for t in with_outputs(*given)))
    for seed in range(3):
        torch.manual_seed(seed)
        pair.plain.optimizer.zero_grad()
        loss, *others = detached(pair.plain.model, *pair.inputs)
        loss.backward()
        pair.plain.optimizer.step()
        torch.manual_seed(seed)
        found = pair.step(*pair.inputs)
        assert all(map(same_bits, found, (loss.detach(), *others)))
    pair.assert_same()


@pytest.mark.long
def test_a_step_that_the_store_failed_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = compiled()
    pair.train()
    engine = pair.step.engine
    assert engine is not None
    plain, calls = engine.await_prefetch, [0]

    def failing(tensor: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 5:
            raise StoreError("the disk is gone")
        return plain(tensor)

    torch.manual_seed(9)
    expected = pair.plain(*pair.inputs)
    torch.manual_seed(9)
    monkeypatch.setattr(engine, "await_prefetch", failing)
    with pytest.raises(StoreError, match="disk is gone"):
        pair.step(*pair.inputs)
    assert pair.step.is_unfinished
    assert same_bits(pair.step.resume(), expected)
    pair.train()
    pair.assert_same()


@pytest.mark.long
def test_under_autocast() -> None:
    pair = compiled(Cnn)
    with torch.autocast("cpu", torch.bfloat16):
        pair.train(3)
    pair.assert_same()


@pytest.mark.long
def test_micro_batches_have_one_partition() -> None:
    model = made(Lm)
    optimizer = torch.optim.AdamW(model.parameters())
    step = overspill.train_step(
        model, cross_entropy, optimizer, budget=SMALLEST, store="host", backend="inductor", accumulate=2
    )
    step(*batch_for(model, 32))
    assert len(step.plans) == len(step.partitions) > 1
    assert len({*step.partitions}) == 1
    assert step.partitions[0] is not None


@pytest.mark.long
def test_what_the_loss_reads_from_outside_is_read_as_it_is_in_each_step() -> None:
    torch.manual_seed(0)
    model, target, scale = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False), torch.tensor(1.0)

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return ((model(x) - target(x)) * scale).square().mean()

    step = overspill.train_step(
        model, loss, torch.optim.SGD(model.parameters(), 0.0), budget="1GiB", backend="inductor"
    )
    x = torch.randn(4, 8)
    for _ in range(2):
        torch.testing.assert_close(step(x), loss(model, x).detach())
        target.load_state_dict({name: value + 1 for name, value in target.state_dict().items()})
        scale.mul_(2)
    step.close()
