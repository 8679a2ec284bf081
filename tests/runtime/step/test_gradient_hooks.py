"""Hooks on weights are part of a step: called with each gradient, where and in which order plain autograd calls them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import Lm, Mlp, Plain, batch_for, cross_entropy, differences, made
from tests.turns import by_turns
from torch import Tensor, nn
from torch.nn.modules import module as of_all

import overspill
from overspill.core.errors import UnsupportedError
from overspill.runtime.reachable import same_bits


class Sides:
    """A model trained by the plain loop, and a copy by a planned step, with the same hooks."""

    def __init__(
        self, hooked: Callable[[nn.Module], None], make: Callable[[], nn.Module] = Mlp, **options: Any
    ) -> None:
        gradients = {k: v for k, v in options.items() if k in ("accumulate", "clip_norm")}
        plain = made(make)
        self.model = copy.deepcopy(plain)
        hooked(plain)
        hooked(self.model)
        self.plain = Plain(plain, torch.optim.AdamW(plain.parameters(), 1e-2), **gradients)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        given = {"budget": "1GiB", "store": "host"} | options
        self.step = overspill.train_step(self.model, cross_entropy, self.optimizer, **given)
        self.inputs = batch_for(plain)

    def train(self, steps: int = 2) -> None:
        for seed in range(steps):
            torch.manual_seed(seed)
            expected = self.plain(*self.inputs)
            after = torch.get_rng_state()
            torch.manual_seed(seed)
            assert same_bits(self.step(*self.inputs), expected)
            assert torch.equal(torch.get_rng_state(), after)
            assert differences(self.plain.model, self.plain.optimizer, self.model, self.optimizer) == []


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def noisy(model: nn.Module) -> None:
    for weight in trained(model):
        weight.register_hook(lambda g: g + 0.01 * torch.randn_like(g))


def in_place(model: nn.Module) -> None:
    for weight in trained(model):
        weight.register_hook(lambda g: g.mul_(0.5).clamp_(-0.01, 0.01))


def several(model: nn.Module) -> None:
    for weight in trained(model)[:3]:
        mask = torch.arange(weight.numel()).view(weight.shape) % 3 > 0
        weight.register_hook(lambda g, mask=mask: g * mask)
        weight.register_hook(lambda g: torch.nn.functional.dropout(g, 0.3))
        weight.register_hook(lambda g: None)


def with_weights(model: nn.Module) -> None:
    for weight in trained(model):
        weight.register_hook(lambda g, w=weight: g + 0.1 * w.detach().sign())


def of_modules(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda _m, given, _made: tuple(g if g is None else g * 2 for g in given))


OPTIONS = [{}, {"accumulate": 2}, {"clip_norm": 0.1}, {"budget": "smallest", "policy": "window"}]


@pytest.mark.short("in_place-Mlp-options13", "several-Lm-options18")
@pytest.mark.parametrize(
    ("hooked", "make", "options"), by_turns([noisy, in_place, several, with_weights], [Lm, Mlp], OPTIONS)
)
def test_hooks_on_weights_are_called(
    hooked: Callable[[nn.Module], None], make: Callable[[], nn.Module], options: dict[str, Any]
) -> None:
    Sides(hooked, make, **options).train()


def test_backward_hooks_of_modules_are_called() -> None:
    Sides(of_modules, lambda: nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5))).train()


def test_hooks_of_all_modules_are_called_for_the_models_own_alone() -> None:
    sides = Sides(lambda _: None, lambda: nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 5)))
    sides.train()
    with ExitStack() as stack:
        for handle in (
            of_all.register_module_forward_hook(lambda _m, _given, made: made * 1.5),
            of_all.register_module_full_backward_pre_hook(lambda _m, gradients: tuple(g * 2 for g in gradients)),
        ):
            stack.callback(handle.remove)
        sides.train()


@pytest.mark.long
def test_a_hook_on_a_modules_backward_that_comes_later_may_keep_what_it_sees_in_a_dictionary() -> None:
    sides, kept = Sides(lambda _: None), {"of": dict[nn.Module, Tensor]()}
    sides.train()
    for model in (sides.plain.model, sides.model):
        model.middle.register_full_backward_hook(lambda m, _, gradients: kept["of"].update({m: gradients[0].norm()}))
    sides.train()


def test_hooks_that_come_go_and_change_are_followed() -> None:
    factor = [1.0]

    def hooked(model: nn.Module) -> None:
        model.last.weight.register_hook(lambda g: g * factor[0])

    sides = Sides(hooked)
    sides.train()
    factor[0] = 3.0
    sides.train()
    handles = [m.last.bias.register_hook(torch.neg) for m in (sides.plain.model, sides.model)]
    sides.train()
    for handle in handles:
        handle.remove()
    sides.train()


def test_what_a_hook_counts_is_refused() -> None:
    seen: list[int] = []
    sides = Sides(lambda model: None)
    sides.model.last.weight.register_hook(lambda g: seen.append(1))
    with pytest.raises(UnsupportedError, match="seen"):
        sides.step(*sides.inputs)


def test_hooks_that_read_gradients_are_refused() -> None:
    sides = Sides(lambda model: None)
    sides.model.last.weight.register_hook(lambda g: g if g.isfinite().all() else g * 0)
    with pytest.raises(UnsupportedError, match="reads values"):
        sides.step(*sides.inputs)


def test_hooks_on_weights_that_only_the_user_updates_are_refused() -> None:
    model = made()
    optimizer = torch.optim.SGD(model.middle.parameters(), 0.1)
    model.last.weight.register_hook(torch.neg)
    step = overspill.train_step(model, cross_entropy, optimizer, budget="1GiB", store="host", allow_untrained=True)
    with pytest.raises(UnsupportedError, match=r"last\.weight .*requires_grad_\(False\)"):
        step(*batch_for(model))
    model.last.weight.requires_grad_(False)
    step(*batch_for(model))


def test_hooks_are_refused_with_kernels_of_inductor() -> None:
    sides = Sides(noisy, backend="inductor")
    with pytest.raises(UnsupportedError, match=r'gradient hook.*backend="eager"'):
        sides.step(*sides.inputs)


def noted(model: nn.Module, seen: list[Tensor]) -> None:
    model.last.weight.register_post_accumulate_grad_hook(seen.append)


def test_hooks_behind_accumulation_are_refused() -> None:
    sides = Sides(lambda model: noted(model, []))
    with pytest.raises(UnsupportedError, match=r"last\.weight .*use register_hook"):
        sides.step(*sides.inputs)
