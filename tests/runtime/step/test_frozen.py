"""A weight that no update changes is written to the store once, and from then on only read; it stays what the user made it."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.runtime.step.whole_steps import differences
from tests.turns import by_turns
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core import TensorKind, Verb
from overspill.core.errors import RequestError, StoreError
from overspill.plans.plan import Plan
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.train_step import TrainStep

WIDTH = 128


class Adapted(nn.Module):
    """A frozen linear layer and a low-rank adapter with dropout beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.drop = nn.Dropout(0.1)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


class Quantised(Adapted):
    """The same over a weight of eight bits, and its scales."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(self.base.weight.abs().amax(1, keepdim=True) / 127, requires_grad=False)
        eight = (self.base.weight / self.scale).round().to(torch.int8)
        self.base = nn.ParameterDict({"eight": nn.Parameter(eight, requires_grad=False)})

    def forward(self, x: Tensor) -> Tensor:
        weight = self.base["eight"].to(x.dtype) * self.scale
        return F.linear(x, weight) + self.up(self.down(self.drop(x)))


def layers(kind: type[nn.Module], count: int = 6) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(kind(), nn.Tanh()) for _ in range(count)))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Job:
    """A frozen model with adapters, trained by a whole step and, a copy of it, by the plain loop."""

    def __init__(self, budget: float | str, kind: type[nn.Module] = Adapted, **options: object) -> None:
        self.plain = layers(kind)
        self.model = copy.deepcopy(self.plain)
        self.plain_optimizer, self.optimizer = (
            torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), 1e-2) for m in (self.plain, self.model)
        )
        self.step: TrainStep = overspill.train_step(
            self.model, loss_of, self.optimizer, budget=budget, store="host", **options
        )
        self.number = 0

    def batch(self) -> Tensor:
        """What the next step is given."""
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(self.number))

    def train(self) -> int:
        """One step of both, with the same loss; the bytes that it wrote to the store."""
        before = self.step.engine.offloaded_bytes if self.step.engine else 0
        torch.manual_seed(self.number)
        self.compare(self.step(self.batch()))
        assert self.step.engine is not None
        return self.step.engine.offloaded_bytes - before

    def compare(self, loss: Tensor) -> None:
        """The plain loop's step on the same batch, whose loss this is."""
        torch.manual_seed(self.number)
        expected = loss_of(self.plain, self.batch())
        expected.backward()
        self.plain_optimizer.step()
        self.plain_optimizer.zero_grad()
        assert same_bits(loss, expected.detach())
        self.number += 1

    def assert_same(self) -> None:
        assert differences(self.plain, self.plain_optimizer, self.model, self.optimizer) == []

    def in_both(self) -> list[str]:
        """The names of the weights that are on the device and have a copy in the store."""
        return [name for name, of in self.step._state.residency.residents.items() if of.hidden is not None]


def moved(plan: Plan, verb: Verb) -> int:
    return sum(plan.graph.tensors[t].nbytes for t in plan.schedule.targets(verb))


def reads(plan: Plan) -> set[int]:
    """The weights that the plan fetches and no op of it writes."""
    found = set(plan.schedule.targets(Verb.PREFETCH)) & plan.graph.read_only
    assert all(plan.graph.tensors[t].kind is TensorKind.PARAMETER for t in found)
    return found


@pytest.mark.short("Adapted-smallest-auto4", "Quantised-smallest-window1")
@pytest.mark.parametrize(
    ("kind", "budget", "policy"),
    by_turns([Adapted, Adapted, Adapted, Quantised], [0.85, 0.5, "smallest", "smallest"], ["auto", "window"]),
)
def test_a_frozen_weight_is_written_once_and_then_only_read(
    kind: type[nn.Module], budget: float | str, policy: str
) -> None:
    job = Job(budget, kind, policy=policy)
    first, *later = (job.train() for _ in range(3))
    (plan,) = job.step.plans
    fetched = reads(plan)
    # There it is enough to compute the weight of eight bits times its scales again.
    assert fetched or (kind, budget, policy) == (Quantised, 0.85, "auto")
    assert not fetched & set(plan.schedule.targets(Verb.OFFLOAD))
    assert later == [moved(plan, Verb.OFFLOAD)] * 2, "what the plan says, which has no frozen weight"
    assert first - later[0] <= sum(plan.graph.tensors[t].nbytes for t in {*fetched, *plan.schedule.stored})
    job.assert_same()


@pytest.mark.long
def test_micro_batches_read_frozen_weights_that_were_written_once() -> None:
    job = Job(0.5, accumulate=2)
    x = torch.randn(8, WIDTH)
    written = [0]
    for _ in range(3):
        job.step(x)
        assert job.step.engine is not None
        written.append(job.step.engine.offloaded_bytes)
    for plan in job.step.plans:
        assert reads(plan)
        assert not reads(plan) & set(plan.schedule.targets(Verb.OFFLOAD))
    assert written[3] - written[2] == written[2] - written[1] < written[1]


@pytest.fixture
def both() -> Job:
    """A job in whose plan some frozen weight stays on the device between steps and leaves it within them."""
    job = Job(0.85)
    job.train()
    assert job.in_both()
    return job


def test_what_is_written_to_a_weight_between_steps_counts_wherever_its_copies_are(both: Job) -> None:
    for change in (0.5, 0.25):
        for model in (both.plain, both.model):
            for layer in model:
                layer[0].base.weight.data.mul_(1 + change)  # as adapters are merged, which no version counter sees
        assert both.in_both() == []
        assert both.train() > 0, "written anew"
        assert both.train() == 0
    both.assert_same()


@pytest.mark.long
def test_a_weight_loaded_or_given_other_data_is_followed(both: Job) -> None:
    other = {name: value + 1 for name, value in both.plain.state_dict().items()}
    for model in (both.plain, both.model):
        model.load_state_dict(other)
    both.train()
    for model in (both.plain, both.model):
        for layer in model:
            layer[0].base.weight.data = layer[0].base.weight.data * 2
    both.train()
    both.assert_same()


@pytest.mark.long
def test_evaluation_sees_the_weights_and_the_next_step_goes_on(both: Job) -> None:
    x = torch.randn(4, WIDTH)
    for model in (both.plain, both.model):
        model.eval()
    with torch.no_grad():
        assert same_bits(both.model(x), both.plain(x))
    for model in (both.plain, both.model):
        model.train()
    both.train()
    both.assert_same()


@pytest.mark.long
def test_who_holds_a_weight_reads_and_writes_it_wherever_its_copies_are() -> None:
    job = Job(0.85)
    held, plain = dict(job.model.named_parameters()), dict(job.plain.named_parameters())
    job.train()
    name = job.in_both()[0].removeprefix("model.")
    assert same_bits(held[name], plain[name])
    job.train()
    for weights in (held, plain):
        weights[name].data.mul_(2)
    job.train()
    job.assert_same()


@pytest.mark.long
def test_what_is_given_to_a_held_weight_is_taken_over() -> None:
    job = Job(0.85)
    held, plain = dict(job.model.named_parameters()), dict(job.plain.named_parameters())
    job.train()
    name = job.in_both()[0].removeprefix("model.")
    held[name].data = torch.ones(held[name].shape)
    plain[name].data = torch.ones(held[name].shape)
    job.train()
    job.assert_same()


@pytest.mark.short("True")
@pytest.mark.parametrize("gives_up", [False, True])
def test_a_step_that_stops_where_such_a_weight_is_fetched_is_finished_or_given_up(
    both: Job, monkeypatch: pytest.MonkeyPatch, *, gives_up: bool
) -> None:
    engine = both.step.engine
    assert engine is not None
    await_prefetch, failing = engine.await_prefetch, [True]

    def fails(data: Tensor) -> Tensor:
        if failing:
            failing.pop()
            raise StoreError("the disk is gone")
        return await_prefetch(data)

    monkeypatch.setattr(engine, "await_prefetch", fails)
    torch.manual_seed(both.number)
    with pytest.raises(StoreError, match="unfinished"):
        both.step(both.batch())
    with pytest.raises(RequestError, match="neither the old"):
        both.model.state_dict()
    if gives_up:
        both.step.abandon()
        both.assert_same()
    else:
        both.compare(both.step.resume())
    both.train()
    assert both.in_both()
    both.assert_same()


@pytest.mark.long
def test_what_is_on_the_device_is_counted_though_it_is_hidden(both: Job) -> None:
    state = both.step._state
    hidden = [state.residency[name].spec.nbytes for name in both.in_both()]
    there = state.present_bytes()
    assert len(state.present()) > len(hidden)
    assert there > sum(hidden)
    both.step.synchronize()
    assert state.present_bytes() == state.whole_bytes() >= there
    assert both.in_both() == []
    both.assert_same()
