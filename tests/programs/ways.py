"""Ways to train: adapters, teachers, averages, mixed precision, checkpoints, layers that thaw, losses that learn, and so on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.programs.harness import Made, Memory, program
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint


class Mlp(nn.Module):
    """A plain network that the programs of this file vary."""

    def __init__(self, width: int = 256, depth: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.into = nn.Linear(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.into(x))
        for layer in self.layers:
            x = x + self.drop(F.gelu(layer(x)))
        return self.head(x)


def labelled(count: int, size: int = 512):
    for _ in range(count):
        yield torch.randn(size, 64), torch.randint(0, 10, (size,))


def classification(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(x), labels)


class Lora(nn.Module):
    """A frozen linear layer and a narrow one beside it that learns."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + (x @ self.down.T) @ self.up.T


@program("LoRA: a frozen base with adapters", "compile", "train_step")
def lora(memory: Memory) -> Made:
    model = Mlp().requires_grad_(False)
    for index, layer in enumerate(model.layers):
        model.layers[index] = Lora(layer)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    step = memory.step(model, classification, optimizer)
    for x, labels in labelled(3, 1024):
        yield step(x, labels)
    yield model


@program("distillation: a teacher without gradients, a student, one budget")
def distillation(memory: Memory) -> Made:
    teacher, student = Mlp(384, 4), Mlp(128, 6)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    teacher, student = memory.together(teacher.requires_grad_(False).eval(), student)
    for x, labels in labelled(4, 1024):
        with torch.no_grad():
            told = teacher(x)
        found = student(x)
        soft = F.kl_div(F.log_softmax(found / 2, dim=1), F.softmax(told / 2, dim=1), reduction="batchmean") * 4
        loss = 0.7 * soft + 0.3 * F.cross_entropy(found, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, told, student


@program("exponential moving average of the weights, by hand")
def moving_average(memory: Memory) -> Made:
    model = Mlp(128, 8)
    average = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled = memory.compile(model, beside=average.values())
    for x, labels in labelled(3, 1024):
        loss = F.cross_entropy(compiled(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for name, value in model.state_dict().items():
                average[name].mul_(0.99).add_(value, alpha=0.01)
        yield loss, compiled, *average.values()


@program("mixed precision: autocast in bfloat16", "compile", "train_step")
def autocast(memory: Memory) -> Made:
    model = Mlp(dropout=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if memory.trains_by_step:
        step = memory.step(model, classification, optimizer)
        for x, labels in labelled(3, 1024):
            with torch.autocast("cpu", torch.bfloat16):
                loss = step(x, labels)
            yield loss
        yield model
        return
    compiled = memory.compile(model)
    for x, labels in labelled(3, 1024):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(compiled(x), labels)
        loss.backward()
        optimizer.step()
        yield loss
    yield model


@program("mixed precision: autocast in float16 with a GradScaler, unscaled to be clipped")
def grad_scaler(memory: Memory) -> Made:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    model = memory.compile(model)
    for x, labels in labelled(3, 512):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = F.cross_entropy(model(x), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        yield loss, scaler.get_scale(), model


class Checkpointed(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.into(x))
        for layer in self.layers:
            x = x + checkpoint(lambda x, layer=layer: self.drop(F.gelu(layer(x))), x, use_reentrant=False)
        return self.head(x)


@program("gradient checkpointing: torch.utils.checkpoint in the model")
def checkpointed(memory: Memory) -> Made:
    model = Checkpointed(128, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = memory.compile(model)
    for x, labels in labelled(3, 1024):
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


class Swish(torch.autograd.Function):
    """x · sigmoid(x), which saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class Straight(torch.autograd.Function):
    """Rounds, with the gradient passed straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 16).round() / 16

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class WithFunctions(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = Swish.apply(self.into(x))
        for layer in self.layers:
            x = x + Swish.apply(F.linear(x, Straight.apply(layer.weight), layer.bias))
        return self.head(x)


@program("custom autograd.Functions: a memory-saving activation, straight-through rounding", "compile", "train_step")
def custom_function(memory: Memory) -> Made:
    model = WithFunctions(128, 5)
    step = memory.step(model, classification, torch.optim.Adam(model.parameters(), lr=1e-3))
    for x, labels in labelled(3, 1024):
        yield step(x, labels)
    yield model


@program("a frozen trunk that thaws midway, with a new parameter group", "compile")
def thawing(memory: Memory) -> Made:
    model = Mlp(128, 6)
    for part in (model.into, model.layers):
        part.requires_grad_(False)
    optimizer = torch.optim.Adam(model.head.parameters(), lr=1e-3)
    compiled = memory.compile(model)
    for number, (x, labels) in enumerate(labelled(5, 1024)):
        if number == 2:
            trunk = [*model.into.parameters(), *model.layers.parameters()]
            for parameter in trunk:
                parameter.requires_grad_(True)
            optimizer.add_param_group({"params": trunk, "lr": 1e-4})
        loss = F.cross_entropy(compiled(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, compiled


class Experts(nn.Module):
    """Each row goes to the two of four experts that a gate likes best."""

    def __init__(self, width: int = 64, count: int = 4) -> None:
        super().__init__()
        self.gate = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)) for _ in range(count)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(dim=-1)
        best, chosen = shares.topk(2, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            weight = (best * (chosen == number)).sum(dim=-1, keepdim=True)
            out = out + weight * expert(x)
        return self.head(x + out), shares.mean(dim=0).square().sum()


class RoutedExperts(Experts):
    """The same, but an expert computes only the rows that were sent to it: how many follows from the data."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(x).softmax(dim=-1)
        best, chosen = shares.topk(2, dim=-1)
        best = best / best.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            out = out.index_add(0, rows, best[rows, place, None] * expert(x[rows]))
        return self.head(x + out), shares.mean(dim=0).square().sum()


def routed_loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    found, balance = model(x)
    return F.cross_entropy(found, labels) + 0.01 * balance


@program("mixture of experts: top-2 gate, every expert sees every row", "compile", "train_step")
def experts(memory: Memory) -> Made:
    model = Experts()
    step = memory.step(model, routed_loss, torch.optim.Adam(model.parameters(), lr=1e-3))
    for x, labels in labelled(3, 1024):
        yield step(x, labels)
    yield model


@program("mixture of experts: rows are sent to experts, so shapes follow from values", "compile", "train_step")
def routed_experts(memory: Memory) -> Made:
    model = RoutedExperts()
    step = memory.step(model, routed_loss, torch.optim.Adam(model.parameters(), lr=1e-3))
    for x, labels in labelled(3, 2048):
        yield step(x, labels)
    yield model


class ActorCritic(nn.Module):
    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, 6), nn.Linear(width, 1)

    def forward(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


@program("REINFORCE with a baseline: actions drawn from a Categorical")
def reinforce(memory: Memory) -> Made:
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3)
    policy = memory.compile(policy)
    for _ in range(3):
        seen = torch.randn(1024, 64)
        logits, values = policy(seen)
        drawn = Categorical(logits=logits)
        actions = drawn.sample()
        rewards = (actions == seen[:, :6].argmax(dim=1)).float()
        advantage = rewards - values.detach()
        loss = -(drawn.log_prob(actions) * advantage).mean() + F.smooth_l1_loss(values, rewards)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, actions, policy


@program("PPO: a rollout without gradients, then epochs of clipped updates in minibatches")
def ppo(memory: Memory) -> Made:
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4, eps=1e-5)
    seen, actions = torch.empty(1024, 64), torch.empty(1024, dtype=torch.long)
    before, returns, advantages = (torch.empty(1024) for _ in range(3))
    policy = memory.compile(policy, beside=(seen, actions, before, returns, advantages))
    for _ in range(2):
        with torch.no_grad():
            for rows in torch.arange(1024).split(256):
                seen[rows] = torch.randn(256, 64)
                logits, values = policy(seen[rows])
                drawn = Categorical(logits=logits)
                actions[rows] = drawn.sample()
                before[rows] = drawn.log_prob(actions[rows])
                returns[rows] = (actions[rows] == seen[rows, :6].argmax(dim=1)).float()
                advantages[rows] = returns[rows] - values
        for rows in torch.randperm(1024).split(512):
            logits, values = policy(seen[rows])
            drawn = Categorical(logits=logits)
            ratio = (drawn.log_prob(actions[rows]) - before[rows]).exp()
            gain = torch.min(ratio * advantages[rows], ratio.clamp(0.8, 1.2) * advantages[rows])
            loss = -gain.mean() + 0.5 * (values - returns[rows]).square().mean() - 0.01 * drawn.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        yield loss, policy


class UncertaintyWeights(nn.Module):
    """Weighs several losses by how sure each task is, which it learns."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.log_variances = nn.Parameter(torch.zeros(tasks))

    def forward(self, losses: Tensor) -> Tensor:
        return (losses * torch.exp(-self.log_variances) + self.log_variances).sum()


class MultiTask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Mlp(128, 6)
        self.body.head = nn.Identity()
        self.classes, self.number = nn.Linear(128, 10), nn.Linear(128, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.classes(hidden), self.number(hidden)


@program("several tasks, weighed by uncertainties that are learned in the loss")
def multi_task(memory: Memory) -> Made:
    model, weigh = MultiTask(), UncertaintyWeights(2)
    optimizer = torch.optim.Adam([*model.parameters(), *weigh.parameters()], lr=1e-3)
    model = memory.compile(model)
    for x, labels in labelled(3, 1024):
        classes, numbers = model(x)
        loss = weigh(torch.stack([F.cross_entropy(classes, labels), F.huber_loss(numbers, x[:, :3])]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model, weigh


@program("spectral norm and weight norm by parametrization")
def parametrized(memory: Memory) -> Made:
    model = nn.Sequential(
        spectral_norm(nn.Conv2d(1, 16, 3, padding=1)), nn.LeakyReLU(0.1),
        weight_norm(nn.Conv2d(16, 32, 3, padding=1)), nn.LeakyReLU(0.1),
        spectral_norm(nn.Conv2d(32, 16, 3, padding=1)), nn.LeakyReLU(0.1),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), weight_norm(nn.Linear(256, 10)),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = memory.compile(model)
    for _ in range(3):
        loss = F.cross_entropy(model(torch.rand(16, 1, 28, 28)), torch.randint(0, 10, (16,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


class Dropouts(nn.Module):
    """Every kind of dropout."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)])
        self.drops = nn.ModuleList([nn.Dropout2d(0.3), nn.AlphaDropout(0.1)])
        self.features, self.last = nn.FeatureAlphaDropout(0.2), nn.Dropout(0.5)
        self.head = nn.Linear(width * 64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2, self.training)
        for layer, drop in zip(self.layers, self.drops, strict=True):
            x = drop(F.selu(layer(x)))
        x = self.features(F.rrelu(F.max_pool2d(x, 4), training=self.training))
        return self.head(self.last(x.flatten(1)))


@program("a net full of dropout", "compile", "train_step")
def dropouts(memory: Memory) -> Made:
    model = Dropouts()
    step = memory.step(model, classification, torch.optim.NAdam(model.parameters(), lr=1e-3))
    for _ in range(3):
        yield step(torch.rand(16, 3, 32, 32), torch.randint(0, 10, (16,)))
    yield model
