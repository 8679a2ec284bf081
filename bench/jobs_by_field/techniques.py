"""Ways to train that go with any model: branches, norms, functions of one's own, losses over gradients."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from .finetuning import mean_square
from .job import job
from .ways import Steps, Way

logger = logging.getLogger(__name__)


def rows(*shape: int, steps: int = 3) -> list[Tensor]:
    """Random batches."""
    return [torch.randn(shape) for _ in range(steps)]


def mlp() -> nn.Sequential:
    """A small classifier."""
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))


def labelled(batch: int = 32, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches for it."""
    return [(torch.randn(batch, 32), torch.randint(0, 10, (batch,))) for _ in range(steps)]


def classification(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy."""
    return F.cross_entropy(model(x), labels)


class Branches(nn.Module):
    """Takes one of two layers by what its input is, and says so where the input is strange."""

    def __init__(self) -> None:
        super().__init__()
        self.above, self.below = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1000:
            logger.warning("a large batch")
        return self.above(x).relu() if x.mean() > 0 else self.below(x).relu()


@job("a branch on the mean of the input, which alternates")
def branch(way: Way) -> Steps:
    return way.train(Branches(), mean_square, [torch.randn(64, 32) + shift for shift in (1, -1, 1, -1)])


@job("a loss that is clipped by its own value, with .item()")
def branch_on_loss(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        value = classification(model, x, labels)
        return value * (2.0 / value.item()) if value.item() > 2.0 else value

    return way.train(mlp(), loss, labelled())


class Rotated(nn.Module):
    """Pairs of features turned by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("turns", torch.polar(torch.ones(16, 16), torch.randn(16, 16)))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.into(x).unflatten(-1, (16, 2)))
        return self.out(torch.view_as_real(pairs * self.turns).flatten(-2))


@job("rotary embedding by complex numbers")
def rope_complex(way: Way) -> Steps:
    return way.train(Rotated(), mean_square, rows(4, 16, 32))


@job("spectral norm and weight norm")
def normed(way: Way) -> Steps:
    model = nn.Sequential(
        spectral_norm(nn.Conv2d(3, 16, 3)), nn.LeakyReLU(0.2), weight_norm(nn.Conv2d(16, 16, 3)), nn.Flatten(),
        nn.Linear(16 * 144, 1),
    )  # fmt: skip
    return way.train(model, lambda model, x: F.softplus(-model(x)).mean(), rows(8, 3, 16, 16))


@job("several dropouts, of elements, channels and attention")
def dropouts(way: Way) -> Steps:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(32, 32), nn.Linear(32, 32)
            self.elements, self.channels, self.alpha = nn.Dropout(0.1), nn.Dropout1d(0.2), nn.AlphaDropout(0.1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.channels(self.elements(self.into(x)).mT).mT
            heads = x.unflatten(-1, (4, 8)).transpose(1, 2)
            attended = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1).transpose(1, 2).flatten(2)
            return self.alpha(self.out(F.rrelu(attended, training=True)))

    return way.train(Dropping(), mean_square, rows(4, 12, 32))


class Square(torch.autograd.Function):
    """A square that keeps its input in half the bytes."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.to(torch.bfloat16))
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x.to(gradient.dtype) * gradient


class InPlace(torch.autograd.Function):
    """A ReLU that writes over its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0)


class Applied(nn.Module):
    """A Function between two layers."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.into, self.out, self.function = nn.Linear(32, 64), nn.Linear(64, 10), function

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function.apply(self.into(x)))


@job("a Function that keeps its input in bfloat16")
def custom_function(way: Way) -> Steps:
    return way.train(Applied(Square), classification, labelled())


@job("a Function that changes its input")
def custom_in_place(way: Way) -> Steps:
    return way.train(Applied(InPlace), classification, labelled())


class AddsItself(torch.autograd.Function):
    """A product whose backward adds to the weight's gradient by itself, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        found = gradient.T @ x
        ctx.weight.grad = found if ctx.weight.grad is None else ctx.weight.grad + found
        return gradient @ ctx.weight, None


@job("a Function whose backward adds to a weight's gradient by itself")
def adds_gradient_itself(way: Way) -> Steps:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.weight = nn.Linear(32, 32), nn.Parameter(torch.randn(10, 32) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            return AddsItself.apply(self.into(x).relu(), self.weight)

    return way.train(Fused(), classification, labelled())


class Scaled(nn.Module):
    """A product in few levels, scaled by the largest value of the last steps (as with fp8)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 32) * 0.1)
        self.register_buffer("history", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.history.amax() / 127
        with torch.no_grad():
            self.history.copy_(torch.cat([x.abs().amax()[None], self.history[:-1]]))
        rounded = (x / scale).round().clamp(-127, 127) * scale
        return (x + (rounded - x).detach()) @ self.weight.T


@job("products in few levels, scaled by a history in a buffer")
def few_levels(way: Way) -> Steps:
    return way.train(Scaled(), classification, labelled())


@job("gradients of each sample by vmap and grad, clipped in the loss (differential privacy)")
def per_sample_gradients(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        weights = dict(model.named_parameters())

        def one(weights: dict[str, Tensor], x: Tensor, label: Tensor) -> Tensor:
            return F.cross_entropy(functional_call(model, weights, (x[None],)), label[None])

        each = vmap(grad(one), in_dims=(None, 0, 0))({n: w.detach() for n, w in weights.items()}, x, labels)
        sizes = torch.stack([g.flatten(1).square().sum(1) for g in each.values()]).sum(0).sqrt()
        shares = (1 / (sizes + 1e-6)).clamp(max=1)
        return sum((torch.einsum("b,b...->...", shares, g) * weights[n]).sum() for n, g in each.items()) / len(x)

    return way.train(mlp(), loss, labelled(8), has_gradients=True)


@job("MAML: a step within the loss, and its derivative")
def maml(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor, later: Tensor, later_labels: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(functional_call(model, weights, (x,)), labels)
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(model, moved, (later,)), later_labels)

    return way.train(mlp(), loss, [(*a, *b) for a, b in zip(labelled(8), labelled(8), strict=True)], has_gradients=True)


@job("SAM: the loss at weights that were moved uphill")
def sam(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        weights = dict(model.named_parameters())
        here = F.cross_entropy(functional_call(model, weights, (x,)), labels)
        slopes = torch.autograd.grad(here, list(weights.values()))
        size = torch.stack([g.norm() for g in slopes]).norm() + 1e-12
        uphill = {name: w + 0.05 * g / size for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(model, uphill, (x,)), labels)

    return way.train(mlp(), loss, labelled())


@job("adversarial training: inputs moved by the sign of their gradient (FGSM)")
def adversarial(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), labels), x)
        return F.cross_entropy(model(x.detach() + 0.1 * slope.sign()), labels)

    return way.train(mlp(), loss, labelled())


@job("gradient noise drawn in hooks on the weights")
def gradient_hooks(way: Way) -> Steps:
    model = mlp()
    for weight in model.parameters():
        weight.register_hook(lambda g: g + 0.01 * torch.randn_like(g))
    return way.train(model, classification, labelled())


@job("mixup: a share drawn in Python, SGD with Nesterov momentum, a schedule")
def mixup(way: Way) -> Steps:
    def loss(model: nn.Module, x: Tensor, labels: Tensor, share: Tensor) -> Tensor:
        found, order = model(torch.lerp(x.flip(0), x, share)), labels.flip(0)
        return share * F.cross_entropy(found, labels) + (1 - share) * F.cross_entropy(found, order)

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    step = way.step(model, loss, optimizer)
    for x, labels in [*labelled(), *labelled(5, 1)]:
        yield step(x, labels, torch.distributions.Beta(0.4, 0.4).sample())
        schedule.step()


@job("an average of the weights beside, made by hand between steps")
def moving_average(way: Way) -> Steps:
    model = mlp()
    average = {name: value.clone() for name, value in model.state_dict().items()}
    step = way.step(model, classification)
    for x, labels in labelled():
        loss = step(x, labels)
        for name, value in model.state_dict().items():
            average[name].lerp_(value, 0.01)
        yield loss, average


@job("a frozen trunk that thaws midway, with a new parameter group")
def thawing(way: Way) -> Steps:
    model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 10))
    trunk = [*model[0].requires_grad_(False).parameters()]
    optimizer = torch.optim.Adam(model[2].parameters(), 1e-3)
    step = way.step(model, classification, optimizer)
    for number, (x, labels) in enumerate(labelled(512, 5)):
        if number == 2:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": trunk, "lr": 1e-4})
        yield step(x, labels)
