"""Optimizers of other libraries and of users: the user's own object steps, with the numbers of a plain loop."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import SMALLEST, Cnn, Mlp, Pair
from tests.turns import rest_long
from torch import Tensor, nn

import overspill
from overspill.core.errors import InfeasibleBudgetError, RequestError, UnsupportedError
from overspill.runtime.reachable import same
from overspill.runtime.tracker import LiveBytes

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import optimizer_habits
import optimizers
from optimizer_habits import HABITS, Each, Late

SHORT = {
    "momenta on the object, by parameter", "noise", "brings large parameters together",
    "a wrapper that delegates",
}  # fmt: skip
"""One habit of each kind: where the state is, and what an update reads."""
CLIPPED = {"clip_norm": 0.5, "clip_value": 0.01}
BY_COMPILE = {"counts steps of each parameter before it looks for a gradient"}
CASES = [(what, way) for way in optimizers.WAYS for what in HABITS]
TAKES_SCRATCH = ["Muon", "Muon lr"]
"""Their products in bfloat16 take scratch on the CPU. The first step tells so, and later ones are planned for it; a tracker
around the step hides it from the step's own."""
OF_LIBRARIES = [
    (library, way) for library in optimizers.SOURCES if library != "habits" for way in optimizers.WAYS
    if (library, way) != ("pytorch_optimizer", "compile")
]  # fmt: skip
"""Without a hundred that would take hours: `python bench/optimizers.py --way compile`."""


@pytest.mark.parametrize(
    "case", rest_long(CASES, {(w, "train_step") for w in SHORT} | {(w, "compile") for w in BY_COMPILE})
)
def test_whatever_users_write_trains_with_the_plain_loop_s_numbers_within_the_budget(case: tuple[str, str]) -> None:
    what, way = case
    row = optimizers.tried("habits", what, [HABITS[what]], way)
    assert (row.outcome, row.note) == ("identical", "")
    assert row.over_bytes <= 0


@pytest.mark.long
@pytest.mark.parametrize(("library", "way"), OF_LIBRARIES)
def test_every_optimizer_of_a_library_has_the_plain_loop_s_numbers_or_is_refused(library: str, way: str) -> None:
    try:
        rows = [*optimizers.rows_of([library], way=way)]
    except ImportError:
        pytest.skip("needs make jobs-libraries")
    trained = [row for row in rows if row.outcome != "plain fails"]
    over = [row.name for row in trained if row.over_bytes > 0]
    assert [row for row in trained if row.outcome == "other numbers"] == []
    assert over == [] or (way == "train_step" and over == TAKES_SCRATCH)
    assert sum(row.outcome == "refused" for row in trained) <= len(trained) / 10


def differ(pair: Pair) -> bool:
    plain, planned = (copy.deepcopy((p.model.state_dict(), p.optimizer.state_dict())) for p in (pair.plain, pair))
    return not same(plain, planned)


@pytest.mark.short("a norm of the whole parameter-gradients0")
@pytest.mark.parametrize(
    ("what", "gradients"),
    [
        ("a norm of the whole parameter", CLIPPED),
        ("changes its gradients in place", {"accumulate": 2}),
        pytest.param("noise", CLIPPED, marks=pytest.mark.long),
        pytest.param("momenta on the object, by parameter", {"accumulate": 2}, marks=pytest.mark.long),
    ],
)
def test_gradients_are_clipped_and_added_up_before(what: str, gradients: dict[str, Any]) -> None:
    pair = Pair(Mlp, lambda p: HABITS[what](_Holding(p)), gradients)
    pair.train(3)
    assert not differ(pair)


class _Holding:
    """What habits make an optimizer of."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = [*parameters]

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters


@pytest.mark.long
def test_what_all_parameters_are_needed_for_later_is_noticed_before_that_step() -> None:
    class VeryLate(Late):
        since = 20

    pair = Pair(Mlp, VeryLate, {}, {"budget": "1GiB"})
    pair.train(19)
    (updates,) = pair.step._state.updates
    assert not updates.at_once
    pair.train(4)
    assert updates.at_once
    assert not differ(pair)


def test_a_budget_without_room_for_all_parameters_names_the_optimizer() -> None:
    pair = Pair(Mlp, lambda p: HABITS["noise"](_Holding(p)), {}, {"budget": 20_000})
    with pytest.raises(InfeasibleBudgetError, match=r"Noise.*random"):
        pair.step(*pair.inputs)


def test_gradients_that_are_one_tensor_are_changed_apart() -> None:
    """As of a sum: both parameters get the very gradient of its result, which the optimizer clamps in place."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.zeros(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return (self.one + self.other) @ x

    class Scales(Each):
        def one(self, group: dict[str, Any], p: Tensor) -> None:
            p.sub_(p.grad.mul_(3), alpha=group["lr"])  # type: ignore[union-attr]

    def loss_fn(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        return model(x[:, :4].T.contiguous()).square().mean()

    pair = Pair(Sum, Scales, {}, {}, loss_fn=loss_fn)
    pair.inputs = torch.randn(8, 12), torch.zeros(8)
    pair.train(3)
    assert not differ(pair)


class Aliases(Each):
    """Keeps the weight itself."""

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(self.state[p].setdefault("w", p.detach()) * 0.1 + p.grad, alpha=group["lr"])


class Shares(Each):
    """Keeps one tensor for all parameters of a shape."""

    def begin(self) -> None:
        made: dict[Any, Tensor] = {}
        for _, p in self.trained():
            if "v" not in self.state[p]:
                self.state[p]["v"] = made.setdefault(p.shape, torch.zeros_like(p))

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        p.sub_(self.state[p]["v"].add_(p.grad), alpha=group["lr"])


class Reads(Each):
    """Reads the state of another optimizer."""

    def __init__(self, parameters: Any) -> None:
        first, *others = parameters
        super().__init__(others)
        self.first = torch.optim.SGD([first], 0.1, momentum=0.9)


@pytest.mark.parametrize("kind", [Aliases, Shares, Reads])
def test_state_that_cannot_be_taken_apart_is_refused(kind: Any) -> None:
    with pytest.raises(UnsupportedError, match="state"):
        Pair(Mlp, kind)


def test_one_tensor_in_two_states_is_refused_when_it_is_put_there() -> None:
    pair = Pair(Mlp, lambda p: torch.optim.Adam(p, 1e-2))
    pair.train(2)
    state = pair.optimizer.state
    state[pair.model.last.bias]["step"] = state[pair.model.last.weight]["step"]
    with pytest.raises(UnsupportedError, match="one tensor"):
        pair.step(*pair.inputs)


# -- several


def by_shape(parameters: Any, kinds: Any) -> list[torch.optim.Optimizer]:
    held = [*parameters]
    return [
        kind([p for p in held if (p.dim() == 2) is matrix], lr=1e-2)
        for kind, matrix in zip(kinds, (True, False), strict=True)
    ]


def test_muon_and_adamw_step_in_turn() -> None:
    torch.manual_seed(0)
    plain = Mlp()
    model = copy.deepcopy(plain)
    kinds = torch.optim.Muon, torch.optim.AdamW
    expected, managed = by_shape(plain.parameters(), kinds), by_shape(model.parameters(), kinds)
    step = overspill.train_step(model, nn.CrossEntropyLoss(), managed, budget=SMALLEST, store="host")
    assert step.optimizers == managed
    schedules = [torch.optim.lr_scheduler.StepLR(o, 1, 0.7) for o in (*expected, *managed)]
    x, y = torch.randn(8, 12), torch.randint(0, 5, (8,))
    for seed in range(4):
        torch.manual_seed(seed)
        for optimizer in expected:
            optimizer.zero_grad()
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        for optimizer in expected:
            optimizer.step()
        torch.manual_seed(seed)
        assert torch.equal(step(x, y), loss.detach())
        for schedule in schedules:
            schedule.step()
    states = [(m.state_dict(), [o.state_dict() for o in os]) for m, os in ((plain, expected), (model, managed))]
    assert same(*copy.deepcopy(states))


@pytest.mark.long
def test_a_parameter_that_no_optimizer_has_may_stay_as_it_is() -> None:
    model = Mlp()
    left_out = model.last.bias
    before = left_out.detach().clone()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p is not left_out], 0.1)
    step = overspill.train_step(model, nn.CrossEntropyLoss(), optimizer, budget="1GiB", allow_untrained=True)
    step(torch.randn(8, 12), torch.randint(0, 5, (8,)))
    assert torch.equal(left_out, before)
    optimizer.param_groups[0]["params"].pop()
    step(torch.randn(8, 12), torch.randint(0, 5, (8,)))


# -- bytes


class Held(Each):
    """Keeps what its first step says nothing of."""

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        if state["step"] == 30:
            state["late"] = [torch.zeros_like(p)]
        for late in state.get("late", ()):
            p.sub_(late.add_(p.grad), alpha=group["lr"])  # type: ignore[arg-type]
        p.sub_(p.grad * (p + 1), alpha=group["lr"])  # type: ignore[operator]


@pytest.mark.short("RAdam")
@pytest.mark.parametrize("kind", [torch.optim.RAdam, Held], ids=["RAdam", "state made late"])
def test_the_budget_holds_where_later_steps_take_more(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    pair = Pair(Mlp, kind, {}, {"budget": SMALLEST})
    peaks = []
    for _ in range(34 if kind is Held else 8):
        pair.step.tracker = LiveBytes(torch.device("cpu"))
        pair.train()
        peaks.append(pair.step.tracker.peak_bytes <= pair.step.plans[0].budget_bytes)
    assert all(peaks[:29] + peaks[30:])
    assert not differ(pair)
    assert "more than planned" not in caplog.text


def test_an_update_that_takes_more_than_it_showed_is_told_and_planned_for(caplog: pytest.LogCaptureFixture) -> None:
    class Hidden(Each):
        """Takes more where no trial is: for the parameter of just that size."""

        def one(self, group: dict[str, Any], p: Tensor) -> None:
            more = (
                [p.grad.clone() for _ in range(3)]
                if p.is_leaf and type(p) is nn.Parameter and p.numel() == 32 * 32
                else []
            )  # type: ignore[union-attr]
            p.sub_(p.grad, alpha=group["lr"] + 0 * len(more))  # type: ignore[arg-type]

    pair = Pair(Mlp, Hidden, {}, {"budget": "1GiB"})
    pair.train(1)
    assert "by Hidden took 11.0 KiB more than planned" in caplog.text
    before = len(caplog.records)
    pair.train(2)
    assert len(caplog.records) == before
    assert not differ(pair)


@pytest.mark.long
def test_settings_that_change_leave_the_state_in_the_store() -> None:
    pair = Pair(Mlp, lambda p: torch.optim.SGD(p, 0.05, momentum=0.9), {}, {"budget": SMALLEST})
    pair.train(2)
    for settings in ({"foreach": True}, {"momentum": 0.0}, {"momentum": 0.5}, {"nesterov": True}):
        for optimizer in (pair.plain.optimizer, pair.optimizer):
            optimizer.param_groups[0].update(settings)
        pair.step.tracker = LiveBytes(torch.device("cpu"))
        pair.train()
        assert pair.step.tracker.peak_bytes <= pair.step.plans[-1].budget_bytes
    assert not differ(pair)


# -- what users do with it between steps


class Averaging(Each):
    """Trains at one point and evaluates at another, as schedule-free ones do."""

    def one(self, group: dict[str, Any], p: Tensor) -> None:
        state = self.state[p]
        if "z" not in state:
            state["z"] = p.clone()
        state["z"].sub_(p.grad, alpha=group["lr"])  # type: ignore[arg-type]
        p.lerp_(state["z"], 0.3)

    @torch.no_grad()
    def swap(self, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if "z" in self.state[p]:
                    p.data.lerp_(end=self.state[p]["z"], weight=weight)


@pytest.mark.long
def test_an_optimizer_may_change_weights_between_steps() -> None:
    pair = Pair(Cnn, Averaging)
    for _ in range(3):
        pair.train(2)
        for optimizer in (pair.plain.optimizer, pair.optimizer):
            optimizer.swap(0.5)  # type: ignore[attr-defined]
    assert not differ(pair)


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("counter in the group", marks=pytest.mark.long),
        "a projector in the state, made anew every third step",
    ],
)
def test_a_checkpoint_goes_on_with_counters_and_containers(what: str, tmp_path: Path) -> None:
    pair = Pair(Mlp, lambda p: HABITS[what](_Holding(p)))
    pair.train(2)
    torch.save((pair.model.state_dict(), pair.optimizer.state_dict()), tmp_path / "checkpoint")
    pair.step.close()
    model, state = torch.load(tmp_path / "checkpoint", weights_only=False)
    pair.model.load_state_dict(model)
    pair.optimizer = pair.make_optimizer(pair.model.parameters())
    pair.optimizer.load_state_dict(state)
    pair.make_step()
    pair.train(2)
    assert not differ(pair)


def test_an_error_of_the_optimizer_is_its_own_and_what_it_had_done_stays() -> None:
    class Fails(optimizer_habits.InGroup):
        fails = False

        def one(self, group: dict[str, Any], p: Tensor) -> None:
            if self.fails and type(p) is nn.Parameter and p.dim() == 1 and p.numel() == 5:
                raise ValueError("of its own")
            super().one(group, p)

    pair = Pair(Mlp, Fails, {}, {"budget": "1GiB"})
    pair.train(2)
    state = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
    pair.optimizer.fails = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="of its own"):
        pair.step(*pair.inputs)
    with pytest.raises(RequestError, match="abandon"):
        pair.model.state_dict()
    pair.step.abandon()
    pair.optimizer.fails = False  # type: ignore[attr-defined]
    pair.model.load_state_dict(state[0])
    pair.optimizer.load_state_dict(state[1])
    pair.train(2)
    assert not differ(pair)
