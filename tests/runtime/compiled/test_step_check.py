"""No optimizer step of a compiled model goes without a plan, and steps that need none are left alone."""

from __future__ import annotations

import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill
from overspill.errors import UnplannedError
from overspill.runtime.compiled.step_check import shown

BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def forget_compiled_code() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


def net(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)), nn.Linear(8, *widths or (8,)))


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    model.forward = overspill.compile(model.forward, budget="1GiB", store="host", **options)
    return model


def loss_of(call: Callable[[Tensor], Tensor]) -> Tensor:
    return call(BATCH).square().mean()


def steps(call: Callable[[Tensor], Tensor], optimizer: torch.optim.Optimizer, count: int = 3) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        loss_of(call).backward()
        optimizer.step()


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


def patch(model: nn.Module) -> None:
    """Put a forward over the model's, with its names but without a call of it, as libraries do."""
    forward = model.forward

    @functools.wraps(type(model).forward)
    def fused(self: nn.Sequential, x: Tensor, slow: bool = False) -> Tensor:
        if slow:
            return forward(x)
        for layer in self:
            x = layer(x)
        return x

    model.forward = types.MethodType(fused, model)


# -- steps without a plan


def test_who_put_a_forward_over_the_compiled_one_is_named_before_the_second_update() -> None:
    model = compiled(net())
    patch(model)
    before = []

    def call(x: Tensor) -> Tensor:
        before.append(model[0].weight.detach().clone())
        return model(x)

    with pytest.raises(UnplannedError, match="replaced its compiled") as error:
        steps(call, sgd(model))
    assert f"{__name__}.patch.<locals>.fused replaced" in str(error.value), "not the forward that it claims to be"
    assert "callbacks.Budget" in str(error.value)
    assert len(before) == 2
    assert torch.equal(before[1], model[0].weight)


def test_a_compiled_forward_that_nobody_keeps_is_missed_all_the_same() -> None:
    model = compiled(net())
    layers = nn.Sequential(*model)
    model.forward = layers.__call__
    gc.collect()
    with pytest.raises(UnplannedError, match="_wrapped_call_impl replaced"):
        steps(model, sgd(model))


def test_a_forward_replaced_in_the_middle_of_a_run_is_noticed() -> None:
    model = compiled(net())
    optimizer = sgd(model)
    steps(model, optimizer)
    patch(model)
    with pytest.raises(UnplannedError, match="fused replaced"):
        steps(model, optimizer)


def test_a_forward_that_is_never_called_is_noticed() -> None:
    model = net()
    call = overspill.compile(model.forward, budget="1GiB", store="host")
    with pytest.raises(UnplannedError, match="two optimizer steps"):
        steps(model, sgd(model))
    assert not call.overspill.plans


def test_who_wants_no_error_is_warned_once() -> None:
    model, plain = compiled(net(), on_unplanned="warn"), net()
    plain.load_state_dict(model.state_dict())
    patch(model)
    with pytest.warns(UserWarning, match="fused replaced") as warned:
        steps(model, sgd(model), 5)
    assert len(warned) == 1
    steps(plain, sgd(plain), 5)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


@pytest.mark.parametrize("kept", ["none", "zeros"])
def test_what_is_replaced_is_noticed_beside_a_head_of_the_users(kept: str) -> None:
    model, head = compiled(net()), nn.Linear(8, 1)
    patch(model)
    optimizer = sgd(model, head)
    optimizer.zero_grad = functools.partial(optimizer.zero_grad, set_to_none=kept == "none")
    with pytest.raises(UnplannedError, match="fused replaced"):
        steps(nn.Sequential(model, head), optimizer)


# -- steps that are planned, or need no plan


def test_a_wrapper_that_calls_the_compiled_forward_is_no_replacement() -> None:
    model = compiled(net())
    inner = model.forward

    def scaled(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return inner(*args).float()

    model.forward = scaled
    steps(model, sgd(model))


def test_evaluation_and_accumulation_between_steps_need_no_further_plan() -> None:
    model = compiled(net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            loss_of(model).backward()
        optimizer.step()
        with torch.no_grad():
            model(BATCH)


def test_a_frozen_teacher_and_its_optimizer_are_left_alone() -> None:
    student, teacher = net(), compiled(net().requires_grad_(requires_grad=False))
    optimizer = sgd(student, teacher)  # its parameters have no gradients
    steps(lambda x: student(x) - teacher(x).detach(), optimizer)


def test_several_optimizers_may_step_after_one_backward() -> None:
    model = compiled(net())
    first, second = sgd(model[0]), sgd(model[1], model[2])
    for _ in range(3):
        first.zero_grad()
        second.zero_grad()
        loss_of(model).backward()
        first.step()
        second.step()


@pytest.mark.long
def test_two_players_with_an_optimizer_each_are_left_alone() -> None:
    generator, critic = compiled(net()), compiled(net(1))
    of_generator, of_critic = sgd(generator), sgd(critic)
    for _ in range(3):
        of_critic.zero_grad()
        critic(generator(BATCH).detach()).mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(BATCH)).mean().neg().backward()
        of_generator.step()


def test_skipped_steps_of_a_scaler_are_left_alone() -> None:
    model, scaler = compiled(net()), torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=1)
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(model) * (float("inf") if step % 2 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**4, "two were skipped"


def test_steps_without_gradients_or_with_zeros_are_left_alone() -> None:
    model = compiled(net())
    optimizer = sgd(model)
    for _ in range(3):
        optimizer.step()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for _ in range(3):
        optimizer.step()
    steps(model, optimizer)


def test_one_step_on_gradients_of_the_users_is_left_alone() -> None:
    model = compiled(net())
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()  # as checkpoints are loaded
    steps(model, optimizer)


def test_a_second_model_that_shares_parameters_may_train_them() -> None:
    model, head = compiled(net()), nn.Linear(8, 1)
    other = nn.Sequential(*model, head)  # the same layers
    optimizer = sgd(model, head)
    steps(other, optimizer)
    steps(model, optimizer)
    steps(other, optimizer)
    with pytest.raises(UnplannedError, match="two optimizer steps"):
        steps(nn.Sequential(*model), optimizer)


def test_a_second_compiled_model_that_shares_parameters_may_train_them() -> None:
    model = compiled(net())
    optimizer = sgd(model)
    steps(overspill.compile(nn.Sequential(*model), budget="1GiB", store="host"), optimizer)
    steps(overspill.compile(lambda x: model(x) + 1, budget="1GiB", store="host"), optimizer)
    steps(model, optimizer)


def test_a_step_with_a_closure_is_checked_by_the_gradients_before_it() -> None:
    model = compiled(net())
    optimizer = sgd(model)

    def closure() -> float:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss.item()

    for _ in range(3):
        optimizer.step(closure)
    patch(model)
    optimizer.step(closure)
    optimizer.step(closure)
    with pytest.raises(UnplannedError, match="fused replaced"):
        optimizer.step(closure)


def test_a_train_step_of_the_same_model_is_left_alone() -> None:
    model = net()
    optimizer, call = sgd(model), overspill.compile(model.forward, budget="1GiB", store="host")
    step = overspill.train_step(model, lambda m, x: m(x).square().mean(), optimizer, budget="1GiB", store="host")
    for _ in range(3):
        step(BATCH)
        with torch.no_grad():
            call(BATCH)
    step.close()


def test_who_takes_the_compiled_forward_away_trains_on_without_it() -> None:
    model, other = compiled(net()), net()
    optimizer = sgd(model)
    steps(model, optimizer)
    del model.forward
    gc.collect()
    steps(model, optimizer)
    original, optimizer = other.forward, sgd(other)
    compiled(other)
    steps(other, optimizer)
    other.forward = original
    gc.collect()
    steps(other, optimizer)


def test_a_model_is_not_kept_alive() -> None:
    model = compiled(net())
    steps(model, sgd(model))
    gone = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None


def test_callables_are_shown_by_their_own_code() -> None:
    class Called:
        def __call__(self) -> None: ...

    assert shown(Called()).endswith("<locals>.Called")
    assert shown(functools.partial(patch, None)) == f"{__name__}.patch"
    assert shown(nn.Linear(2, 2).forward) == "torch.nn.modules.linear.Linear.forward"
