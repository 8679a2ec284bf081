"""Loops at budgets below weights, gradients and state, run plainly and compiled, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import overspill
from overspill.runtime.compiled.named_backend import session_with

WIDTH = 64
Make = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
adamw = OPTIMIZERS["adamw"]


@dataclass
class Run:
    """One run of a loop, plain or compiled."""

    budget: str | None
    store: str
    how: str = "compile"
    seen: list[Any] = field(default_factory=list)
    session: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    optimizers: list[Optimizer] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def begin(self, model: nn.Module, *make: tuple[Make, list[Any]]) -> Callable[..., Any]:
        """Return the model as the loop calls it, with optimizers over the parameters given with each."""
        self.model = model
        self.optimizers = [one(parameters) for one, parameters in make]
        if self.budget is None:
            return model
        if self.how == "by name":
            self.options = {"budget": self.budget, "store": self.store}
            return torch.compile(model, backend="overspill", options=self.options, dynamic=False)  # type: ignore[return-value]
        compiled = overspill.compile(model, budget=self.budget, store=self.store)
        self.session = compiled.overspill
        return compiled

    def see(self, *values: Any) -> None:
        """Compare these with the other run."""
        self.seen += [value.detach().clone() if isinstance(value, Tensor) else value for value in values]

    def moves(self) -> None:
        """Check that a plan moves parameters."""
        if self.how == "by name" and self.budget is not None:
            self.session = session_with(self.options)
        if self.session is not None:
            state = self.session.loop.state
            assert state is not None
            assert state.in_force

    def end(self) -> list[Any]:
        """Return all that was seen, with weights, buffers, gradients and optimizer state."""
        for parameter in self.model.parameters():
            self.see(parameter, parameter.grad)
        self.see(*self.model.buffers())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                self.see(*(state[key] for key in sorted(state)))
        return self.seen


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def compare(loop: Callable[[Run], None], budget: str = "45%", store: str = "host", how: str = "compile") -> Run:
    """Run `loop` plain and compiled, and compare all that it saw."""
    plain, ours = Run(None, store, how), Run(budget, store, how)
    loop(plain)
    expected = plain.end()
    loop(ours)
    found = ours.end()
    assert len(expected) == len(found)
    assert [i for i, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)] == []
    for plan in [] if ours.session is None else ours.session.plans:
        assert plan.peak_bytes <= plan.budget_bytes
    return ours


def net(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def batch(seed: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def begin(run: Run, make: Make = adamw) -> tuple[nn.Sequential, Callable[..., Any], Optimizer]:
    model = net()
    compiled = run.begin(model, (make, list(model.parameters())))
    return model, compiled, run.optimizers[0]


def loss_of(compiled: Callable[..., Any], seed: int) -> Tensor:
    value: Tensor = compiled(batch(seed)).square().mean()
    return value


def step(run: Run, compiled: Callable[..., Any], seed: int) -> None:
    """Do a step of the run's first optimizer, by a plan that moves parameters."""
    loss_of(compiled, seed).backward()
    run.optimizers[0].step()
    run.moves()
    run.optimizers[0].zero_grad()
