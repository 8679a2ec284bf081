"""Small models, the plain training loop that a whole step has to equal, and both side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import overspill
from overspill.devices import load_device
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.tracker import LiveBytes

CPU = torch.device("cpu")
SMALLEST = "smallest"
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 1e-2, foreach=True),
    "adamw, fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2, momentum=0.9, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 1e-2),
}


class Mlp(nn.Module):
    """Linear layers with batch norm, an activation in place, dropout, and a frozen bias."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.norm = nn.BatchNorm1d(width)
        self.act = nn.ReLU(inplace=True)
        self.middle = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(3)))
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 5)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(self.middle(self.act(self.norm(self.first(x))))))


class Cnn(nn.Module):
    """Convolutions with batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.1),
        )  # fmt: skip
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Lm(nn.Module):
    """One transformer block whose output layer is its embedding."""

    def __init__(self, words: int = 40, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.block(self.embed(words)))


class Block(nn.Module):
    """A residual block; `drop` draws random numbers in training."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """Blocks, one of them frozen, between an embedding and an output layer of the same weight."""

    def __init__(self, drop: float = 0.0, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, width)
        self.layers = nn.ModuleList(Block(width, drop) for _ in range(3))
        self.head = nn.Linear(width, 40, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def batch_for(model: nn.Module, size: int = 8) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    if isinstance(model, (Lm, Decoder)):
        words = torch.randint(0, 40, (size, 7), generator=drawn)
        return words[:, :-1].contiguous(), words[:, 1:].contiguous()
    shape = (size, 3, 8, 8) if isinstance(model, Cnn) else (size, 12)
    return torch.randn(shape, generator=drawn), torch.randint(0, 5, (size,), generator=drawn)


def made(model: Callable[[], nn.Module] = Mlp) -> nn.Module:
    torch.manual_seed(0)
    return model()


@dataclass
class Plain:
    """The plain training loop: micro-batches, clipping, one step of the optimizer."""

    model: nn.Module
    optimizer: Optimizer
    accumulate: int = 1
    clip_norm: float | None = None
    clip_value: float | None = None
    loss_fn: Callable[..., Tensor] = cross_entropy

    def __call__(self, *inputs: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        total: Tensor | None = None
        for part in zip(*(i.chunk(self.accumulate) for i in inputs), strict=True):
            loss = self.loss_fn(self.model, *part)
            loss = loss if self.accumulate == 1 else loss / self.accumulate
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(trained, self.clip_value)
        self.optimizer.step()
        assert total is not None
        return total


@dataclass
class Pair:
    """One model trained by the plain loop, and a copy of it by a whole step within a budget.

    With `backend="inductor"` among the options the plain loop's loss function is compiled by stock torch.compile.
    """

    make_model: Callable[[], nn.Module] = Mlp
    make_optimizer: MakeOptimizer = OPTIMIZERS["adamw"]
    gradients: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Any] = cross_entropy
    size: int = 8

    def __post_init__(self) -> None:
        self.plain = Plain(made(self.make_model), None, loss_fn=self.loss_fn, **self.gradients)
        self.model = copy.deepcopy(self.plain.model)
        self.plain.optimizer = self.make_optimizer(self.plain.model.parameters())
        self.optimizer = self.make_optimizer(self.model.parameters())
        self.inputs = batch_for(self.model, self.size)
        self.given = {"policy": "window", "budget": SMALLEST, "store": "host"} | self.options | self.gradients
        self.by_inductor = self.given.get("backend") == "inductor"
        self.unseen = self.by_inductor or self.given.get("placement") == "planned"
        self.make_step()
        self.seed = 0
        if self.by_inductor:
            self.compile()

    def make_step(self) -> None:
        self.step: TrainStep = overspill.train_step(self.model, self.loss_fn, self.optimizer, **self.given)
        self.step.tracker = None if self.unseen else LiveBytes(CPU)

    def compile(self) -> None:
        """What stock torch.compile makes of the plain model as it is now."""
        torch._dynamo.reset()
        self.plain.loss_fn = torch.compile(self.loss_fn, dynamic=False, fullgraph=True)

    def train(
        self, steps: int = 1, inputs: tuple[Tensor, ...] | None = None, around: Callable[[], Any] = nullcontext
    ) -> None:
        """Both take `steps`, which must have the same losses; the managed one within `around()`."""
        for _ in range(steps):
            self.seed += 1
            torch.manual_seed(self.seed)
            expected = self.plain(*(inputs or self.inputs))
            torch.manual_seed(self.seed)
            with around():
                loss = self.step(*(inputs or self.inputs))
            assert same_bits(loss, expected)

    def measured_peak(self) -> int:
        """The peak of one more step; no dispatch mode sees what compiled kernels are given, nor an arena."""
        if not self.unseen:
            self.step.tracker = LiveBytes(CPU)
            self.train()
            return self.step.tracker.peak_bytes
        counted: list[list[int]] = []

        @contextmanager
        def counting() -> Iterator[None]:
            with self.step.counted(self.inputs) as found:
                counted.append(found)
                yield

        self.train(around=counting)
        return counted[0][0]

    def differences(self) -> list[str]:
        """The names of weights, buffers and state that are not the same to the last bit."""
        return differences(self.plain.model, self.plain.optimizer, self.model, self.optimizer)

    def assert_same(self) -> None:
        assert self.differences() == []


FAR = replace(load_device("cpu"), prefetch_bytes_per_second=2e8, offload_bytes_per_second=2e8)
"""A device whose store is so far away that weights are best read once."""


def beside(count: int, model: Callable[[], nn.Module] = Decoder, **options: Any) -> Pair:
    """A pair whose store is so far away that `count` micro-batches run beside one another, if they may."""
    gradients = {"accumulate": count, "clip_norm": options.pop("clip_norm", None)}
    given = {"policy": "auto", "budget": "60KiB", "device": FAR} | options
    return Pair(model, OPTIMIZERS["adamw"], gradients, given, size=2 * count)


def differences(model: nn.Module, optimizer: Optimizer, other: nn.Module, other_optimizer: Optimizer) -> list[str]:
    state, other_state = model.state_dict(), other.state_dict()
    found = [name for name, value in state.items() if not same_bits(value, other_state[name])]
    kept, other_kept = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
    assert {k: list(v) for k, v in kept.items()} == {k: list(v) for k, v in other_kept.items()}
    return found + [
        f"state {key} of {number}" for number, of in kept.items() for key, value in of.items()
        if not same_bits(torch.as_tensor(value), torch.as_tensor(other_kept[number][key]))
    ]  # fmt: skip


def planned_peak(step: TrainStep) -> int:
    return max(plan.peak_bytes for plan in step.plans)
