"""Optimizers as users write them: where they keep counters and state, what their update depends on, how they are wrapped.

`HABITS` has a function from a model to its optimizer, by what it does. All learn: their updates depend on what is kept.
"""

from __future__ import annotations

import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

HABITS: dict[str, Callable[[nn.Module], Optimizer]] = {}


def habit(what: str) -> Callable[[type[Optimizer]], type[Optimizer]]:
    """Register a class that takes parameters alone."""

    def register(kind: type[Optimizer]) -> type[Optimizer]:
        HABITS[what] = lambda model: kind(model.parameters())
        return kind

    return register


class Each(Optimizer):
    """Calls `one(group, parameter)` for each that has a gradient, after `begin()`."""

    def __init__(self, parameters: Any, lr: float = 1e-2, **settings: Any) -> None:
        super().__init__(parameters, {"lr": lr, **settings})

    def begin(self) -> None:
        pass

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        raise NotImplementedError

    def trained(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    yield group, p

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _: Any = None) -> None:
        self.begin()
        for group, p in self.trained():
            self.one(group, p)


@habit("counter in the group")
class InGroup(Each):
    def begin(self) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] / group["step"] ** 0.5)


@habit("counter on the object")
class OnObject(Each):
    calls = 0

    def begin(self) -> None:
        self.calls += 1

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] / self.calls)


@habit("counter on the class")
class OnClass(Each):
    calls = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        OnClass.calls = 0

    def begin(self) -> None:
        OnClass.calls += 1

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] / OnClass.calls)


@habit("counter in a key of the state that is no parameter")
class InState(Each):
    def begin(self) -> None:
        self.state["calls"] = self.state.get("calls", 0) + 1

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] / self.state["calls"])


@habit("counters in a list, a tensor and an object on the object")
class InPlaces(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.history: list[float] = []
        self.count = torch.zeros(())
        self.schedule = types.SimpleNamespace(step=0)

    def begin(self) -> None:
        self.count += 1
        self.schedule.step += 1
        self.history.append(1 / self.schedule.step)

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad * self.count, alpha=-group["lr"] * self.history[-1] / len(self.history))


@habit("momenta in a dictionary, a list and a deque of the state")
class Containers(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["m"] = {beta: torch.zeros_like(p) for beta in (0.5, 0.9)}
            state["all"] = [torch.zeros_like(p), [torch.zeros_like(p)]]
            state["last"] = deque(maxlen=3)
        for beta, m in state["m"].items():
            p.add_(m.mul_(beta).add_(p.grad), alpha=-group["lr"] / 3)
        state["all"][0].add_(p.grad.abs())
        state["all"][1][0] = state["all"][1][0] * 0.9 + state["all"][0]
        state["last"].append(p.grad.clone())
        p.addcdiv_(sum(state["last"]), state["all"][1][0] + 1e-8, value=-group["lr"])


@habit("a projector in the state, made anew every third step")
class Projected(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] % 3 == 2:
            state["projector"] = types.SimpleNamespace(basis=p.grad.flatten(1).clone() if p.dim() > 1 else None)
        if (basis := getattr(state.get("projector"), "basis", None)) is not None:
            p.sub_((p.grad.flatten(1) @ basis.T @ basis).view_as(p), alpha=group["lr"])
        p.add_(p.grad, alpha=-group["lr"])


@habit("new tensors for its state at each step")
class Anew(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        before = self.state[p].get("m", torch.zeros_like(p))
        self.state[p] = {"m": before * 0.9 + p.grad, "n": self.state[p].get("n", 0) + 1}
        p.sub_(self.state[p]["m"], alpha=group["lr"] / self.state[p]["n"])


@habit("momenta on the object, by parameter")
class OnObjectByParameter(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.momenta: dict[Tensor, Tensor] = {}

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        m = self.momenta.setdefault(p, torch.zeros_like(p))
        p.sub_(m.mul_(0.9).add_(p.grad), alpha=group["lr"])


@habit("changes its gradients in place")
class InGradient(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.grad.clamp_(-1e-2, 1e-2).add_(p, alpha=0.1)
        p.sub_(p.grad, alpha=group["lr"])


@habit("a norm of the whole parameter")
class Trust(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad * (p.norm() / (p.grad.norm() + 1e-6)), alpha=group["lr"])


@habit("another rule for large parameters")
class BySize(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad / p.grad.norm() if p.numel() > 4096 else p.grad, alpha=group["lr"])


@habit("random numbers for large parameters")
class DrawsBySize(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad + 1e-2 * torch.randn_like(p) if p.numel() > 1024 else p.grad, alpha=group["lr"])


@habit("noise")
class Noise(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad + 1e-2 * torch.randn_like(p), alpha=group["lr"])


@habit("noise by a generator of its own")
class OwnNoise(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.drawn = torch.Generator().manual_seed(1)

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad + 1e-2 * torch.randn(p.shape, generator=self.drawn), alpha=group["lr"])


@habit("the norm of all gradients, from its fifth step on")
class Late(Each):
    calls, scale, since = 0, 1.0, 5

    def begin(self) -> None:
        self.calls += 1
        if self.calls >= self.since:
            norms = [p.grad.norm() for _, p in self.trained()]
            self.scale = 1 / (1 + torch.stack(norms).norm().item())

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] * self.scale)


@habit("a rate by the parameter's place in its group")
class ByPlace(Each):
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for place, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * 0.9**place)


@habit("a rate that it sets itself at each step, with a warm-up")
class WarmUp(torch.optim.SGD):
    calls = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-2, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        for group in self.param_groups:
            group["lr"] = 1e-2 * min(1, self.calls / 5)
        return super().step(closure)


@habit("clips by the norm of all gradients, which is seldom so large")
class Clips(Each):
    def begin(self) -> None:
        norms = [p.grad.norm() for _, p in self.trained()]
        self.param_groups[0]["scale"] = min(1.0, 2.0 / float(torch.stack(norms).norm()))

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad, alpha=group["lr"] * group["scale"])


@habit("brings large parameters together")
class LargeTogether(Each):
    def one(self, group: dict[str, Any], p: Tensor) -> None:
        large = [q.grad for _, q in self.trained() if q.numel() > 4096]
        p.sub_(
            p.grad / torch.stack([g.norm() for g in large]).norm() if p.numel() > 4096 else p.grad, alpha=group["lr"]
        )


@habit("brings parameters together that have a mark")
class Marked(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        for p in [*self.param_groups[0]["params"]][4:8]:
            p.joint = True

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        joint = [q.grad.norm() for _, q in self.trained() if hasattr(q, "joint")]
        p.sub_(p.grad / torch.stack(joint).norm() if hasattr(p, "joint") else p.grad, alpha=group["lr"])


@habit("clears its state every fourth step")
class Clears(Each):
    calls = 0

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad), alpha=group["lr"])

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.calls += 1
        if self.calls % 4 == 0:
            self.forget()

    def forget(self) -> None:
        self.state.clear()


@habit("zeroes all momenta every fourth step")
class Zeroes(Clears):
    def forget(self) -> None:
        for state in self.state.values():
            state["m"].zero_()


@habit("counts steps of each parameter before it looks for a gradient")
class CountsFirst(Each):
    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] / self.state[p]["n"])


@habit("an iterator, an array and a generator of Python's on the object")
class Iterators(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.counts, self.array, self.drawn = itertools.count(1), np.zeros(1), random.Random(1)

    def begin(self) -> None:
        self.array += 1
        self.rate = self.drawn.random() / next(self.counts) / float(self.array[0])

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad, alpha=group["lr"] * self.rate)


@habit("a scheduler of its own")
class Scheduled(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, 1e-2, momentum=0.9)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self, 10)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.schedule.step()


CALLS = [0]


@habit("a global counter")
class Global(Each):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        CALLS[0] = 0

    def begin(self) -> None:
        CALLS[0] += 1

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(p.grad, alpha=group["lr"] / CALLS[0])


class Averages(torch.optim.SGD):
    """Holds the model, decays its weights and averages it in each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), 1e-2)
        self.model, self.average = model, torch.optim.swa_utils.AveragedModel(model)

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.average.update_parameters(self.model)


HABITS["averages the model that it holds"] = Averages


class Scaled(Each):
    """Takes an argument that it keeps on the object."""

    def __init__(self, parameters: Any, *, factor: float) -> None:
        super().__init__(parameters)
        self.factor = factor

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.add_(p.grad, alpha=-group["lr"] * self.factor)


def patched(model: nn.Module) -> Optimizer:
    """A step that is set on the object, with a counter in its closure."""
    optimizer, calls = torch.optim.SGD(model.parameters(), 1e-2), 0

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self: Optimizer, _: Any = None) -> None:
        nonlocal calls
        calls += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"] / calls)

    optimizer.step = types.MethodType(step, optimizer)
    return optimizer


class Lookahead(Optimizer):
    """Around another optimizer, whose groups and state it shares; slow weights every second step."""

    def __init__(self, base: Optimizer) -> None:
        self.base, self.calls = base, 0
        self.param_groups, self.defaults, self.state = base.param_groups, base.defaults, base.state
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        return {**self.base.state_dict(), "slow": [slow.clone() for slow in self.slow]}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def step(self, _: Any = None) -> None:
        self.base.step()
        self.calls += 1
        if self.calls % 2 == 0:
            for slow, p in zip(self.slow, (p for group in self.param_groups for p in group["params"]), strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Delegating(Optimizer):
    """Shows another optimizer's groups and state as its own, as accelerate's wrapper does."""

    def __init__(self, inside: Optimizer) -> None:
        self.inside = inside

    param_groups = property(lambda self: self.inside.param_groups)
    state = property(lambda self: self.inside.state)
    defaults = property(lambda self: self.inside.defaults)

    def state_dict(self) -> dict[str, Any]:
        return self.inside.state_dict()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inside.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inside.step(closure)


HABITS["an argument kept on the object"] = lambda model: Scaled(model.parameters(), factor=5.0)
HABITS["a step patched on the object, with a counter in its closure"] = patched
HABITS["a wrapper with slow weights"] = lambda model: Lookahead(torch.optim.AdamW(model.parameters(), 1e-2))
HABITS["a wrapper that delegates"] = lambda model: Delegating(torch.optim.AdamW(model.parameters(), 1e-2))
HABITS["several groups, counters in each"] = lambda model: InGroup(
    [{"params": [p], "lr": 1e-2 / n} for n, p in enumerate(model.parameters(), 1)]
)
