"""A step that reads the model's own parameters by references from outside of it gives the bits of the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.runtime.step.test_backward import RunsAgain
from tests.runtime.step.whole_steps import differences
from torch import Tensor, nn

import overspill
from overspill.core.errors import UnsupportedError

Loss = Callable[[nn.Module, Tensor], Tensor]


def a_penalty(model: nn.Module) -> Loss:
    held = list(model.parameters())
    return lambda model, x: model(x).square().mean() + 0.1 * sum(p.square().sum() for p in held)


def what_an_optimizer_holds(model: nn.Module) -> Loss:
    group = torch.optim.SGD(model.parameters(), 0.1).param_groups[0]
    return lambda model, x: model(x).square().mean() + torch.cat([p.flatten() for p in group["params"]]).norm()


def a_functional_call(model: nn.Module) -> Loss:
    held = dict(model.named_parameters())
    return lambda model, x: torch.func.functional_call(model, held, (x,)).square().mean()


def second_derivatives(model: nn.Module) -> Loss:
    held = dict(model.named_parameters())
    at = torch.func.hessian(lambda held, x: torch.func.functional_call(model, held, (x,)).sum(), argnums=1)
    return lambda _, x: torch.vmap(at, (None, 0))(held, x)[:, 0, 0].square().mean()


def second_derivatives_of_the_model(_: nn.Module) -> Loss:
    return lambda model, x: torch.vmap(torch.func.hessian(lambda x: model(x).sum()))(x)[:, 0, 0].square().mean()


def pair(
    reads: Callable[[nn.Module], Loss], **options: Any
) -> tuple[Callable[[Tensor], Tensor], overspill.TrainStep, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    model = copy.deepcopy(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (plain, model)]
    loss = reads(plain)
    step = overspill.train_step(model, reads(model), optimizers[1], **{"budget": "1GiB", "store": "host"} | options)

    def plainly(x: Tensor) -> Tensor:
        optimizers[0].zero_grad()
        found = loss(plain, x)
        found.backward()
        optimizers[0].step()
        return found.detach()

    return plainly, step, lambda: differences(plain, optimizers[0], model, optimizers[1])


@pytest.mark.short(
    "1GiB-a_penalty", "1GiB-what_an_optimizer_holds", "1GiB-a_functional_call", "1GiB-second_derivatives_of_the_model"
)
@pytest.mark.parametrize(
    "reads",
    [a_penalty, what_an_optimizer_holds, a_functional_call, second_derivatives, second_derivatives_of_the_model],
)
@pytest.mark.parametrize("budget", ["1GiB", pytest.param("smallest", marks=pytest.mark.long)])
def test_references_from_outside_are_followed(reads: Callable[[nn.Module], Loss], budget: str) -> None:
    plainly, step, differ = pair(reads, budget=budget)
    x = torch.rand(8, 2)
    for _ in range(3):
        assert step(x) == plainly(x)
    assert differ() == []
    assert len(step.plans) == 1


def test_references_to_what_is_in_the_store_between_steps_are_no_change() -> None:
    plainly, step, differ = pair(a_penalty)
    for _ in range(3):
        x = torch.rand(8, 2)
        assert step(x) == plainly(x)
        step._state.residency.send(["model.0.weight", "model.2.weight"], step._state.engine)
        step._state.arm()
    assert differ() == []
    assert len(step.plans) == 1


def test_references_from_outside_are_refused_where_backward_reads_them() -> None:
    def reads(model: nn.Module) -> Loss:
        weight = model.get_parameter("2.weight")
        return lambda model, x: RunsAgain.apply(lambda h: h @ weight.t(), model[:2](x)).square().mean()  # type: ignore[index]

    _, step, _ = pair(reads)
    with pytest.raises(UnsupportedError, match=r"2\.weight .*a reference"):
        step(torch.rand(8, 2))


def test_parameters_are_parameters_in_a_step() -> None:
    def reads(_: nn.Module) -> Loss:
        def loss(model: nn.Module, x: Tensor) -> Tensor:
            held = [p for m in model.modules() for p in vars(m)["_parameters"].values() if isinstance(p, nn.Parameter)]
            return model(x).square().mean() + model.get_parameter("2.weight").norm() + sum(p.sum() for p in held)

        return loss

    plainly, step, differ = pair(reads)
    x = torch.rand(8, 2)
    for _ in range(2):
        assert step(x) == plainly(x)
    assert differ() == []
