"""Reinforcement learning: actors and critics, targets that lag behind."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from .job import job
from .ways import Steps, Way


class ActorCritic(nn.Module):
    """Logits of actions, and what the state is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor, self.critic = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        x = self.trunk(states)
        return self.actor(x), self.critic(x).squeeze(-1)


@job("actor and critic: a Categorical of logits, its entropy")
def actor_critic(way: Way) -> Steps:
    def loss(model: nn.Module, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        logits, values = model(states)
        policy, advantage = Categorical(logits=logits), returns - values
        gain = policy.log_prob(actions) * advantage.detach() + 0.01 * policy.entropy()
        return advantage.square().mean() - gain.mean()

    batches = [(torch.randn(32, 8), torch.randint(0, 4, (32,)), torch.randn(32)) for _ in range(3)]
    return way.train(ActorCritic(), loss, batches)


@job("PPO: a rollout without gradients, then clipped updates in minibatches of two sizes")
def ppo(way: Way) -> Steps:
    def loss(model: nn.Module, states: Tensor, actions: Tensor, before: Tensor, returns: Tensor) -> Tensor:
        logits, values = model(states)
        policy = Categorical(logits=logits)
        advantage = returns - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        ratio = (policy.log_prob(actions) - before).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return 0.5 * F.mse_loss(values, returns) - clipped - 0.01 * policy.entropy().mean()

    model = ActorCritic()
    step = way.step(model, loss, clip=0.5)
    for _ in range(2):
        states = torch.randn(44, 8)
        with torch.no_grad():
            policy = Categorical(logits=model(states)[0])
            actions = policy.sample()
            before, returns = policy.log_prob(actions), torch.randn(44)
        for part in torch.randperm(44).split(32):
            yield step(*(t[part] for t in (states, actions, before, returns)))


@job("DQN: a target network that is copied now and then")
def dqn(way: Way) -> Steps:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    target = copy.deepcopy(model).requires_grad_(False)

    def loss(model: nn.Module, states: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            best = model(following).argmax(-1, keepdim=True)
            wanted = rewards + 0.99 * target(following).gather(-1, best).squeeze(-1)
        return F.smooth_l1_loss(model(states).gather(-1, actions[:, None]).squeeze(-1), wanted)

    step = way.step(model, loss)
    for index in range(4):
        yield step(torch.randn(32, 8), torch.randint(0, 4, (32,)), torch.randn(32), torch.randn(32, 8))
        if index == 1:
            target.load_state_dict(model.state_dict())


class TwoCritics(nn.Module):
    """Two judgements of what an action in a state is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)) for _ in range(2))

    def forward(self, states: Tensor, actions: Tensor) -> list[Tensor]:
        return [critic(torch.cat([states, actions], -1)) for critic in self.critics]


@job("soft actor-critic: two critics, targets that lag, actions drawn from a squashed normal")
def soft_actor_critic(way: Way) -> Steps:
    actor = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
    critics = TwoCritics()
    targets = copy.deepcopy(critics).requires_grad_(False)

    def acted(policy: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = policy(states).chunk(2, -1)
        normal = Normal(mean, log_scale.clamp(-5, 2).exp())
        drawn = normal.rsample()
        squashed = drawn.tanh()
        return squashed, (normal.log_prob(drawn) - (1 - squashed.square() + 1e-6).log()).sum(-1, keepdim=True)

    def of_critics(model: nn.Module, states: Tensor, actions: Tensor, rewards: Tensor, following: Tensor) -> Tensor:
        with torch.no_grad():
            later, log_probability = acted(actor, following)
            wanted = rewards + 0.99 * (torch.min(*targets(following, later)) - 0.2 * log_probability)
        return sum(F.mse_loss(value, wanted) for value in model(states, actions))

    def of_actor(model: nn.Module, states: Tensor) -> Tensor:
        actions, log_probability = acted(model, states)
        return (0.2 * log_probability - torch.min(*critics(states, actions))).mean()

    step, act = way.step(critics, of_critics), way.step(actor, of_actor)
    for _ in range(3):
        states = torch.randn(32, 8)
        yield step(states, torch.rand(32, 2), torch.randn(32, 1), torch.randn(32, 8)), act(states)
        with torch.no_grad():
            for late, now in zip(targets.parameters(), critics.parameters(), strict=True):
                late.lerp_(now, 0.05)
