"""Edits that users make between two steps, to a model that has a bit of everything: its optimizer and its loss too."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


class Net(nn.Module):
    """Linear layers of one width, batch norm, dropout, and Python attributes of all sorts that forward reads."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.first = nn.Linear(12, width)
        self.mid = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.norm = nn.BatchNorm1d(width)
        self.act: nn.Module = nn.ReLU()
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(width, 5)
        self.scale = 1.5
        self.skip = False
        self.shift = torch.full((width,), 0.25)
        self.gains = [1.0, 2.0]
        self.options = {"power": 1.0}
        self.config = SimpleNamespace(temperature=1.0, nested=SimpleNamespace(bias=0.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)) * self.scale + self.shift
        for layer, gain in zip(self.mid, [*self.gains, 1.0], strict=False):
            x = self.act(layer(x)) * gain + (x if self.skip else 0)
        x = self.drop(x) * self.options["power"] + self.config.nested.bias
        return self.last(x) / self.config.temperature


class Criterion(nn.Module):
    """Cross-entropy with a smoothing that may change."""

    def __init__(self) -> None:
        super().__init__()
        self.label_smoothing = 0.0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, label_smoothing=self.label_smoothing)


WEIGHTS: dict[str, Any] = {"aux": 0.1}
"""A global that the loss reads."""


class Job:
    """One copy: model, optimizer and loss, which edits change alike in the plain and in the managed copy."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.criterion = Criterion()
        self.penalty = 0.01
        self.globals = dict(WEIGHTS)

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        return self.criterion(output, y) + self.penalty * output.square().mean() * self.globals["aux"]


def doubled(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return output * 2


def halved_before(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (args[0] / 2,)


def other_forward(self: Net, x: Tensor) -> Tensor:
    return self.last(self.first(x))


def reordered(job: Job) -> None:
    job.model.mid = nn.ModuleList([job.model.mid[i] for i in (1, 0, 2)])


def tied(job: Job) -> None:
    job.model.mid[0].weight = job.model.mid[1].weight


def swapped(job: Job) -> None:
    one, other = job.model.mid[0], job.model.mid[1]
    one.weight, other.weight = other.weight, one.weight


def without_group(job: Job) -> None:
    job.optimizer.param_groups.pop()


def smaller_group(job: Job) -> None:
    job.optimizer.param_groups[0]["params"] = [p for p in job.optimizer.param_groups[0]["params"] if p.dim() > 1]


def cleared(job: Job) -> None:
    job.optimizer.param_groups[0]["params"].clear()


def lr(job: Job, value: float = 0.01) -> None:
    for group in job.optimizer.param_groups:
        group["lr"] = value


def setting(name: str, value: Any) -> Callable[[Job], None]:
    def edit(job: Job) -> None:
        for group in job.optimizer.param_groups:
            group[name] = value

    edit.__name__ = f"{name}={value}"
    return edit


def attribute(path: str, value: Any) -> Callable[[Job], None]:
    """Sets an attribute of the job, `model.drop.p` say."""

    def edit(job: Job) -> None:
        *owner, name = path.split(".")
        of: Any = job
        for part in owner:
            of = getattr(of, part)
        setattr(of, name, value() if callable(value) else value)

    edit.__name__ = f"{path}={value() if callable(value) else value}"
    return edit


def method(call: Callable[[Job], Any], name: str) -> Callable[[Job], None]:
    def edit(job: Job) -> None:
        with torch.no_grad():
            call(job)

    edit.__name__ = name
    return edit


EDITS: dict[str, Callable[[Job], None]] = {
    edit.__name__: edit
    for edit in [
        tied, swapped, reordered, without_group, smaller_group, cleared, lr,
        attribute("model.last.bias", None), attribute("model.act", nn.GELU), attribute("model.act", nn.Identity),
        attribute("model.drop.p", 0.6), attribute("model.norm.momentum", 0.3), attribute("model.norm.eps", 1e-2),
        attribute("model.norm.track_running_stats", False), attribute("model.scale", 0.5), attribute("model.scale", -0.0),
        attribute("model.skip", True), attribute("model.shift", lambda: torch.ones(12)),
        attribute("criterion.label_smoothing", 0.3), attribute("penalty", 0.5),
        attribute("model.config.temperature", 2.0), attribute("model.config.nested.bias", 0.5),
        attribute("model.gains", lambda: [0.5, 0.5]),
        method(lambda j: j.model.gains.append(0.5), "gains.append"),
        method(lambda j: j.model.gains.pop(), "gains.pop"),
        method(lambda j: j.model.gains.reverse(), "gains.reverse"),
        method(lambda j: j.model.options.update(power=2.0), "options.update"),
        method(lambda j: j.globals.update(aux=3.0), "globals.update"),
        method(lambda j: j.model.shift.add_(1), "shift.add_"),
        method(lambda j: setattr(j.model, "forward", other_forward.__get__(j.model)), "forward patched"),
        method(lambda j: j.model.__dict__.pop("forward", None), "forward restored"),
        method(lambda j: j.model.mid[0].register_forward_hook(doubled), "forward hook"),
        method(lambda j: j.model.mid[0].register_forward_pre_hook(halved_before), "pre hook"),
        method(lambda j: j.model.mid[0]._forward_hooks.clear(), "no forward hooks"),
        method(lambda j: j.model.first.requires_grad_(not j.model.first.weight.requires_grad), "frozen or not"),
        method(lambda j: j.model.eval(), "eval"), method(lambda j: j.model.train(), "train"),
        method(lambda j: j.model.drop.eval(), "drop.eval"),
        method(lambda j: j.model.last.weight.mul_(0.5), "last.weight.mul_"),
        method(lambda j: j.model.norm.reset_running_stats(), "reset_running_stats"),
        method(lambda j: nn.init.constant_(j.model.mid[2].weight, 0.01), "constant_"),
        method(lambda j: j.model.mid[2].weight.data.zero_(), "data.zero_"),
        method(lambda j: setattr(j.model.mid[1].weight, "data", torch.full((12, 12), 0.02)), "data = new"),
        method(lambda j: j.model.load_state_dict(Job().model.state_dict()), "load_state_dict"),
        method(lambda j: j.optimizer.load_state_dict(j.optimizer.state_dict()), "optimizer.load_state_dict"),
        method(lambda j: setattr(j.model, "mid", nn.ModuleList(list(j.model.mid)[:2])), "a layer less"),
        method(lambda j: setattr(j.model, "mid", nn.ModuleList([*j.model.mid, nn.Linear(12, 12)])), "a layer more"),
        method(lambda j: j.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}), "a stranger's parameter"),
        setting("momentum", 0.0), setting("momentum", 0.5), setting("nesterov", True), setting("weight_decay", 0.1),
        setting("maximize", True), setting("dampening", 0.2), setting("foreach", True),
    ]
}  # fmt: skip
"""By name."""


def draw(rng: random.Random) -> tuple[str, ...]:
    """One to three edits at once."""
    return tuple(rng.choices(list(EDITS), k=1 + math.floor(3 * rng.random() ** 2)))
