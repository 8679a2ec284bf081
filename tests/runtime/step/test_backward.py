"""A backward that itself adds to gradients: a whole step gives them to the parameters that plain PyTorch gives them to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import CPU, differences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import overspill
from overspill.capture.compiled.backward import _Kept
from overspill.core.errors import UnsupportedError


class AddsToGrad(torch.autograd.Function):
    """A product whose backward adds the weight's gradient by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found = gradient.t() @ ctx.saved_tensors[0]
        if ctx.weight.grad is None:
            ctx.weight.grad = found
        else:
            ctx.weight.grad.add_(found)
        return gradient @ ctx.weight, None


class RunsAgain(torch.autograd.Function):
    """A checkpoint as many packages write their own."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor, restores: bool = False) -> Tensor:
        ctx.run, ctx.random = run, torch.get_rng_state() if restores else None
        ctx.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        if ctx.random is not None:
            torch.set_rng_state(ctx.random)
        with torch.enable_grad():
            ctx.run(x).backward(gradient)
        return None, x.grad, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1)

    def inner(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).sigmoid())

    def noisy(self, x: Tensor) -> Tensor:
        return F.dropout(self.b(F.dropout(x, 0.2)))


def again(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(function, *args, use_reentrant=True)


def with_a_dummy(net: Net, x: Tensor) -> Tensor:
    return net.c(again(lambda x, _: net.inner(x), x, torch.zeros(1, requires_grad=True)))


def with_a_frozen_start(net: Net, x: Tensor) -> Tensor:
    return net.c(again(net.b, again(net.a, x.detach().requires_grad_())))


def behind_a_trained_layer(net: Net, x: Tensor) -> Tensor:
    return net.c(again(net.b, net.a(x)))


def with_shared_weights(net: Net, x: Tensor) -> Tensor:
    for _ in range(3):
        x = again(lambda x: net.b(net.b(net.b(x).sin()).sin()), x if x.requires_grad else net.a(x))
    return net.c(net.b(x))


def with_an_output_changed_in_place(net: Net, x: Tensor) -> Tensor:
    return net.c(again(lambda x: net.b(x).sigmoid(), net.a(x)).mul_(3))


def with_several_outputs(net: Net, x: Tensor) -> Tensor:
    first, second, _ = again(lambda x: (net.b(x).sigmoid(), x, None), net.a(x))
    return net.c(first + second)


def within_one_another(net: Net, x: Tensor) -> Tensor:
    return net.c(again(lambda x: net.b(again(net.a, x)), x.detach().requires_grad_()))


def of_no_input_with_gradient(net: Net, x: Tensor) -> Tensor:
    return net.c(again(net.inner, x))


def with_a_look_at_the_input(net: Net, x: Tensor) -> Tensor:
    return net.c(
        again(lambda h: net.b(h) if x.mean() > 5 else net.b(h).sin(), again(net.a, x.detach().requires_grad_()))
    )


def with_dropout(net: Net, x: Tensor) -> Tensor:
    return net.c(again(net.noisy, net.a(x)))


def under_autocast(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.c(again(lambda x: net.b(net.b(x)), again(lambda x: net.b(net.b(x).sin()), net.a(x)))).float()


def where_autocast_casts_an_input_once_for_two_layers(net: Net, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return net.c(again(lambda h: net.b(h) * net.a(h) + net.b(h).sin(), net.a(x).float())).float()


def by_a_function_that_adds_to_grad(net: Net, x: Tensor) -> Tensor:
    return net.c(AddsToGrad.apply(AddsToGrad.apply(net.b(net.a(x)).tanh(), net.b.weight).tanh(), net.b.weight))


def by_a_checkpoint_of_ones_own(net: Net, x: Tensor) -> Tensor:
    return net.c(RunsAgain.apply(net.b, RunsAgain.apply(net.a, x.clone().requires_grad_())))


def by_a_backward_in_the_loss(net: Net, x: Tensor) -> Tensor:
    net.c(net.inner(x)).square().mean().backward()
    return net.c(net.b(net.inner(x)).cos())


def by_an_attack_on_the_input(net: Net, x: Tensor) -> Tensor:
    near = x.clone().requires_grad_()
    net.c(net.inner(near)).square().mean().backward()
    net.zero_grad()
    return net.c(net.inner(x + 0.1 * near.grad.sign()))  # type: ignore[union-attr]


def with_weights_clipped_in_forward(net: Net, x: Tensor) -> Tensor:
    with torch.no_grad():
        net.a.weight.clamp_(-0.1, 0.1)
    found = net.c(net.inner(x))
    net.b.weight.data.clamp_(-0.1, 0.1)
    return found


def with_weights_clipped_beside_a_checkpoint(net: Net, x: Tensor) -> Tensor:
    return with_weights_clipped_in_forward(net, x) + behind_a_trained_layer(net, x)


BY_CHECKPOINTS = [
    with_a_dummy, with_a_frozen_start, behind_a_trained_layer, with_shared_weights, with_an_output_changed_in_place,
    with_several_outputs, within_one_another, of_no_input_with_gradient, with_a_look_at_the_input, with_dropout, under_autocast,
    where_autocast_casts_an_input_once_for_two_layers,
]  # fmt: skip
BY_OTHERS = [
    by_a_function_that_adds_to_grad,
    by_a_checkpoint_of_ones_own,
    by_a_backward_in_the_loss,
    by_an_attack_on_the_input,
    with_weights_clipped_in_forward,
    with_weights_clipped_beside_a_checkpoint,
]
Forward = Callable[[Net, Tensor], Tensor]


def loss_of(forward: Forward) -> Callable[[Net, Tensor], Tensor]:
    return lambda net, x: forward(net, x).square().mean()


class Both:
    """A net trained plainly and by a whole step."""

    def __init__(
        self, forward: Forward, plain: Callable[..., Any] = lambda f: f, accumulate: int = 1, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.plain, self.x, self.accumulate = Net(), torch.randn(4, 8), accumulate
        self.net = copy.deepcopy(self.plain)
        self.optimizers = [torch.optim.SGD(n.parameters(), 0.1, momentum=0.9) for n in (self.plain, self.net)]
        self.loss = plain(loss_of(forward))
        self.step = overspill.train_step(
            self.net, loss_of(forward), self.optimizers[1], budget="1GiB", accumulate=accumulate, **options
        )

    def train(self, steps: int = 2) -> None:
        """Both have the same losses, random state and weights, and something has moved."""
        before = copy.deepcopy(self.plain.state_dict())
        for seed in range(steps):
            torch.manual_seed(seed)
            self.optimizers[0].zero_grad()
            losses = [self.loss(self.plain, part) / self.accumulate for part in self.x.chunk(self.accumulate)]
            for one in losses:
                one.backward()
            self.optimizers[0].step()
            expected, random = sum(one.detach() for one in losses), torch.get_rng_state()
            torch.manual_seed(seed)
            assert self.step(self.x) == expected
            assert torch.equal(torch.get_rng_state(), random)
        assert differences(self.plain, self.optimizers[0], self.net, self.optimizers[1]) == []
        assert not torch.equal(before["c.weight"], self.net.c.weight)


@pytest.mark.short(
    "with_shared_weights",
    "with_an_output_changed_in_place",
    "within_one_another",
    "with_dropout",
    "where_autocast_casts_an_input_once_for_two_layers",
    "by_a_function_that_adds_to_grad",
    "by_a_checkpoint_of_ones_own",
    "with_weights_clipped_beside_a_checkpoint",
)
@pytest.mark.parametrize("forward", [*BY_CHECKPOINTS, *BY_OTHERS])
def test_what_backward_adds_to_gradients_is_planned(forward: Forward) -> None:
    Both(forward).train()


@pytest.mark.long
@pytest.mark.parametrize(
    "forward", [behind_a_trained_layer, with_a_dummy, with_a_frozen_start, with_shared_weights, with_dropout]
)
def test_with_inductor_what_backward_adds_to_gradients_is_that_of_stock(forward: Forward) -> None:
    Both(forward, lambda f: torch.compile(f, dynamic=False), backend="inductor", partition=1.0).train()


def test_the_first_layers_of_a_reentrant_checkpoint_are_trained() -> None:
    both = Both(with_a_frozen_start)
    before = both.net.a.weight.detach().clone()
    both.step(both.x)
    assert not torch.equal(both.net.a.weight, before)


def test_layers_without_gradient_in_plain_pytorch_stay_as_they_are() -> None:
    both = Both(of_no_input_with_gradient)
    before = both.net.a.weight.detach().clone()
    both.train()
    assert torch.equal(both.net.a.weight, before)


@pytest.mark.long
def test_what_is_added_once_a_backward_adds_up_over_micro_batches() -> None:
    Both(behind_a_trained_layer, accumulate=2).train()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_what_is_added_several_times_is_refused_for_micro_batches(backend: str) -> None:
    both = Both(by_a_function_that_adds_to_grad, accumulate=2, backend=backend)
    with pytest.raises(UnsupportedError, match=r"b\.weight .*accumulate=1"):
        both.step(both.x)


def seeds(net: Net, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return net.c(net.inner(x))


def seeds_behind_the_scenes(net: Net, x: Tensor) -> Tensor:
    torch.default_generator.manual_seed(3)
    return net.c(net.noisy(net.a(x)))


def draws_apart(net: Net, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return net.c(net.noisy(net.a(x)))


def draws_again(net: Net, x: Tensor) -> Tensor:
    return net.c(RunsAgain.apply(net.noisy, net.a(x), True))


@pytest.mark.parametrize("forward", [seeds, seeds_behind_the_scenes, draws_apart, draws_again])
def test_a_step_that_sets_the_random_state_is_refused_where_that_matters(forward: Forward) -> None:
    both = Both(forward)
    before = torch.get_rng_state()
    with pytest.raises(UnsupportedError, match=r"random generator.*seed"):
        both.step(both.x)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_step_that_puts_the_random_state_back_and_does_not_draw_is_planned() -> None:
    Both(lambda net, x: net.c(RunsAgain.apply(net.b, net.a(x), True))).train()


def changing(change: Callable[[list[Any], Tensor], Any], reentrant: bool, net: Net, x: Tensor) -> Tensor:
    h = net.a(x)
    held = [2, h]
    return net.c(checkpoint(lambda y: (net.b(y) * held[0], change(held, y))[0], h, use_reentrant=reentrant))


@pytest.mark.parametrize("change", [lambda held, _: held.pop(), lambda held, _: held.__setitem__(0, 3)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_that_would_find_something_else_is_refused(change: Any, reentrant: bool) -> None:
    both = Both(partial(changing, change, reentrant))
    with pytest.raises(UnsupportedError, match=r"torch\.utils\.checkpoint .*copy"):
        both.step(both.x)


def test_a_checkpoint_may_collect() -> None:
    Both(partial(changing, list.append, False)).train()


def test_another_models_gradients_are_left_alone() -> None:
    other = nn.Linear(1, 1)
    other.weight.grad = kept = torch.ones(1, 1)
    Both(lambda net, x: again(other, net.c(net.inner(x)))).step(torch.randn(4, 8))
    assert other.weight.grad is kept
    assert other.bias.grad is None


def test_a_capture_that_gives_gradients_to_others_than_autograd_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def loses(ctx: Any, *_: Any) -> Any:
        return (None, None, *(None for _ in ctx.inputs))

    monkeypatch.setattr(_Kept, "backward", staticmethod(loses))
    both = Both(with_a_frozen_start)
    before = copy.deepcopy(both.net.state_dict())
    with pytest.raises(UnsupportedError, match=r"a\.weight, a\.bias, b\.weight"):
        both.step(both.x)
    assert all(torch.equal(value, before[name]) for name, value in both.net.state_dict().items())
    assert both.net.a.weight.device == CPU


def test_a_capture_that_gives_none_where_autograd_does_is_made_again_as_autograd_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = torch.autograd.grad

    def loses_the_first(outputs: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        return (None, *plain(outputs, inputs, *args, **options)[1:])

    monkeypatch.setattr(torch.autograd, "grad", loses_the_first)
    Both(lambda net, x: net.c(net.inner(x))).train()
