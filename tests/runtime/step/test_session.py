"""Several train steps, or a train step and a compiled model, share the budget of one session; what a step asks may be asked first."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.core import TensorKind
from overspill.errors import InfeasibleBudgetError, RequestError
from overspill.runtime.reachable import same_bits


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))


def batch(step: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(step)
    return torch.randn(16, 32), torch.randn(16, 4)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def whole_bytes(model: nn.Module) -> int:
    """Parameters and Adam's two sets of state."""
    return 3 * sum(p.nbytes for p in model.parameters())


def trained_plainly(model: nn.Module, steps: int) -> nn.Module:
    optimizer = adam(model)
    for step in range(steps):
        x, y = batch(step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(map(same_bits, one.state_dict().values(), other.state_dict().values()))


def outside_graph(step: overspill.TrainStep) -> int:
    return sum(
        t.nbytes for t in step.plans[-1].graph.tensors if t.kind is TensorKind.PARAMETER and "elsewhere" in t.name
    )


@pytest.mark.long
def test_two_steps_in_one_session_leave_room_for_one_another() -> None:
    torch.manual_seed(0)
    models = [net(), net()]
    expected = [trained_plainly(copy.deepcopy(m), 3) for m in models]
    session = overspill.Session(budget="3MiB", store="host")
    steps = [overspill.train_step(m, nn.MSELoss(), adam(m), session=session) for m in models]
    for i in range(3):
        for step in steps:
            step(*batch(i))
    for step, other in zip(steps, reversed(models), strict=True):
        assert outside_graph(step) >= whole_bytes(other)
        assert step.peak_bytes <= 3 << 20
    assert all(map(equal, models, expected))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_a_step_reads_what_another_step_has_in_its_store(backend: str) -> None:
    torch.manual_seed(0)
    critic, generator = net(), nn.Linear(16, 32)

    def judged(model: nn.Module, code: Tensor) -> Tensor:
        return critic(model(code)).square().mean()

    judges = overspill.train_step(critic, nn.MSELoss(), adam(critic), budget="smallest", store="host", backend=backend)
    descent = torch.optim.SGD(generator.parameters(), 1.0)
    generates = overspill.train_step(generator, judged, descent, budget="1GiB", store="host", backend=backend)
    for step in range(3):
        judges(*batch(step))
        assert judges._state.residency.away()
        code, before = torch.randn(16, 16), copy.deepcopy(generator)
        loss = judged(before, code)
        loss.backward()
        torch.testing.assert_close(generates(code), loss.detach())
        torch.testing.assert_close(generator.weight, before.weight - before.weight.grad)


def test_what_does_not_fit_beside_the_other_step_is_refused() -> None:
    models = [net(), net()]
    alone = overspill.train_step(models[0], nn.MSELoss(), adam(models[0]), budget="1700KiB", store="host")
    alone(*batch(0))
    alone.close()
    session = overspill.Session(budget="1700KiB", store="host")
    steps = [overspill.train_step(m, nn.MSELoss(), adam(m), session=session) for m in models]
    with pytest.raises(InfeasibleBudgetError, match=r"minimum .* at step\.update") as error:
        [step(*batch(0)) for step in (*steps, *steps)]
    assert error.value.floor_bytes > whole_bytes(models[0])
    assert "train_step" not in str(error.value)


def test_a_compiled_model_and_a_step_in_one_session() -> None:
    torch.manual_seed(0)
    models = [net(), net()]
    expected = [trained_plainly(copy.deepcopy(m), 3) for m in models]
    session = overspill.Session(budget="4MiB", store="host")
    compiled, optimizer = overspill.compile(models[0], session=session), adam(models[0])
    step = overspill.train_step(models[1], nn.MSELoss(), adam(models[1]), session=session)
    for i in range(3):
        x, y = batch(i)
        nn.functional.mse_loss(compiled(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        step(x, y)
    assert outside_graph(step) >= whole_bytes(models[0])
    (plan,) = session.plans
    assert plan.graph.bytes_of(TensorKind.ACTIVATION) >= sum(p.nbytes for p in models[1].parameters())
    assert all(map(equal, models, expected))
    torch._dynamo.reset()


def test_a_session_has_its_own_options() -> None:
    model = net()
    with pytest.raises(RequestError, match="own budget"):
        overspill.train_step(model, nn.MSELoss(), adam(model), budget="1GiB", session=overspill.Session())


def test_plan_and_smallest_budget_are_known_before_a_step() -> None:
    model = net()
    before = [p.clone() for p in model.parameters()]
    step = overspill.train_step(model, nn.MSELoss(), adam(model), budget="1GiB", store="host")
    plan, floor = step.plan(*batch(0)), step.smallest_budget(*batch(0))
    assert all(map(torch.equal, before, model.parameters()))
    assert floor <= plan.peak_bytes
    step(*batch(0))
    assert step.plans == [plan]
    step.close()
    fits = overspill.train_step(model, nn.MSELoss(), adam(model), budget=floor, store="host")
    assert fits.plan(*batch(0)).peak_bytes <= floor
    fits.close()
    below = overspill.train_step(model, nn.MSELoss(), adam(model), budget=floor - 1, store="host")
    with pytest.raises(InfeasibleBudgetError):
        below.plan(*batch(0))
