"""What a step's Python reads is noticed when it changes; what a graph would do only once is refused."""

from __future__ import annotations

import functools
import io
import itertools
import logging
import math
import random
import sysconfig
import threading
import types
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.runtime.step.python_state import NotKept
from overspill.runtime.step.watching import watching
from overspill.runtime.training import same_bits

FACTOR = 1.0
"""A global that `by_global` reads."""


class Plus(nn.Module):
    """A linear layer, and what `change` does behind it."""

    def __init__(self, change: Callable[[Plus, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return y if self.change is None else self.change(self, y)


def batch() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return torch.randn((6, 4), generator=drawn), torch.randint(0, 3, (6,), generator=drawn)


def made(change: Callable[[Plus, Tensor], Tensor] | None = None) -> tuple[Plus, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Plus(change)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any = F.cross_entropy) -> overspill.TrainStep:
    return overspill.train_step(model, loss, optimizer, budget="1MiB", policy="window", store="host")


def counts(model: Plus, y: Tensor) -> Tensor:
    model.calls = getattr(model, "calls", 0) + 1
    return y * model.calls


def caches(model: Plus, y: Tensor) -> Tensor:
    if getattr(model, "cached", None) is None:
        model.cached = torch.ones_like(y)
    return y + model.cached


def draws(_: Plus, y: Tensor) -> Tensor:
    return y if random.random() < 0.5 else y * 2


def draws_with_numpy(_: Plus, y: Tensor) -> Tensor:
    return y * float(np.random.rand())  # noqa: NPY002


def appends(model: Plus, y: Tensor) -> Tensor:
    model.seen = [*model.seen, y] if hasattr(model, "seen") else [y]
    return y


@pytest.mark.parametrize("change", [counts, caches, draws, draws_with_numpy, appends])
def test_what_a_graph_would_do_once_is_refused(change: Callable[[Plus, Tensor], Tensor]) -> None:
    state = random.getstate()
    with pytest.raises(UnsupportedError, match=r"Plus\.\w+|of Python") as refusal:
        step_of(*made(change))(*batch())
    assert "\n" not in str(refusal.value)
    assert random.getstate() == state


def test_an_iterator_that_forward_reads_is_refused() -> None:
    model, optimizer = made(lambda m, y: y * next(m.numbers))
    model.numbers = itertools.count(1)
    with pytest.raises(UnsupportedError, match=r"Plus\.numbers .*iterator"):
        step_of(model, optimizer)(*batch())


@pytest.mark.parametrize(
    ("advancing", "draw"),
    [
        (lambda: iter([2.0, 3.0, 4.0, 5.0, 6.0]), next),
        (lambda: map(float, itertools.count()), next),
        (lambda: (float(n) for n in range(9)), next),
        (lambda: random.Random(1), lambda drawn: drawn.random()),
        (lambda: np.random.default_rng(1), lambda drawn: float(drawn.random())),
        (lambda: np.random.RandomState(1), lambda drawn: float(drawn.rand())),
    ],
)
def test_what_each_step_would_advance_is_refused_where_it_advances(advancing: Any, draw: Any) -> None:
    model, optimizer = made(lambda m, y: y * draw(m.config["numbers"]))
    model.config = {"numbers": advancing()}
    with pytest.raises(UnsupportedError, match=r"Plus\.config .*iterator"):
        step_of(model, optimizer)(*batch())
    model, optimizer = made(lambda m, y: y * len(m.config))
    model.config = {"numbers": advancing()}
    assert step_of(model, optimizer)(*batch()).isfinite()


LOG = logging.getLogger("of a model")
LOCK = threading.Lock()
FILE = io.StringIO()
SCALE: ContextVar[float] = ContextVar("scale", default=1.0)


@functools.lru_cache
def cached(width: int) -> float:
    return width * FACTOR


class Scales:
    """An object that the step makes for itself."""

    def __init__(self, by: float) -> None:
        self.by = by

    def __call__(self, y: Tensor) -> Tensor:
        return helper(y * self.by)


def logs(_: Plus, y: Tensor) -> Tensor:
    LOG.debug("shape %s", y.shape)
    with LOCK:
        print(y.shape, file=FILE)
        return y * cached(y.shape[1]) if LOG.isEnabledFor(logging.WARNING) else y


def test_a_forward_that_logs_locks_writes_and_caches_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LOG, "handlers", [logging.StreamHandler(FILE)])
    monkeypatch.setattr(LOG, "level", logging.DEBUG)
    model, optimizer = made(logs)
    step = step_of(model, optimizer)
    assert all(step(*batch()).isfinite() for _ in range(3))
    assert len(step.plans) == 1


def test_a_context_variable_is_followed() -> None:
    model, optimizer = made(lambda _, y: y * SCALE.get())
    step = step_of(model, optimizer)
    step(*batch())
    token = SCALE.set(0.0)
    assert step(*batch()).item() == pytest.approx(math.log(3))
    SCALE.reset(token)


@pytest.mark.parametrize("where", ["a folder", "an environment"])
def test_what_is_followed_is_the_same_wherever_a_file_lies(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = Path(sysconfig.get_path("purelib") if where == "an environment" else "/somewhere") / "layers.py"
    module = types.ModuleType("layers")
    module.__file__ = str(file)
    source = "import logging\nLOG, GAIN, OTHER = logging.getLogger('layers'), 1.0, 1.0\ndef gain(y):\n LOG.debug('')\n return y * GAIN\n"
    source += "def other(y):\n return y * OTHER\n"
    exec(compile(source, str(file), "exec"), vars(module))
    monkeypatch.setattr(f"{__name__}.LAYERS", module, raising=False)
    model, optimizer = made(lambda _, y: by_one(by_another(y)))
    step = step_of(model, optimizer)
    step(*batch())
    step(*batch())
    assert len(step.plans) == 1
    for name in ("GAIN", "OTHER"):
        monkeypatch.setattr(module, name, 0.0)
        assert step(*batch()).item() == pytest.approx(math.log(3))
        monkeypatch.setattr(module, name, 1.0)


LAYERS: Any = None


def by_one(y: Tensor) -> Tensor:
    return LAYERS.gain(y)


def by_another(y: Tensor) -> Tensor:
    return LAYERS.other(y)


def test_a_hook_that_collects_is_refused() -> None:
    collected: list[Tensor] = []
    model, optimizer = made()
    model.linear.register_forward_hook(lambda _m, _a, output: collected.append(output))
    with pytest.raises(UnsupportedError, match="changes"):
        step_of(model, optimizer)(*batch())


@pytest.mark.parametrize("before", [{}, {"features": torch.ones(6, 3)}])
def test_features_that_a_hook_puts_into_a_dictionary_are_used_in_the_loss_and_not_kept(before: dict[str, Any]) -> None:
    def trained(*, planned: bool) -> tuple[list[Tensor], dict[str, Any]]:
        (model, optimizer), found = made(), dict(before)
        model.linear.register_forward_hook(lambda _m, _a, output: found.update(features=output))

        def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(x), labels) + found["features"].square().mean()

        step = step_of(model, optimizer, loss) if planned else None
        for _ in range(3):
            if step is None:
                optimizer.zero_grad()
                loss(model, *batch()).backward()
                optimizer.step()
            else:
                step(*batch())
        return [*model.parameters()], found

    (expected, _), (ours, found) = trained(planned=False), trained(planned=True)
    assert all(map(torch.equal, expected, ours))
    with pytest.raises(UnsupportedError, match="features"):
        found["features"] + 1


def test_features_of_the_step_before_are_refused() -> None:
    (model, optimizer), found = made(), {"before": torch.zeros(6, 3)}

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        logits = model(x)
        value = F.cross_entropy(logits - found["before"], labels)
        found["before"] = logits.detach()
        return value

    with pytest.raises(UnsupportedError, match="found of loss"):
        step_of(model, optimizer, loss)(*batch())
    assert found["before"].equal(torch.zeros(6, 3))


def test_what_is_set_at_the_first_call_and_changes_nothing_is_no_matter() -> None:
    def notes(model: Plus, y: Tensor) -> Tensor:
        if model.config.kind is None:
            model.config.kind = "set"
        model.ready = True if not getattr(model, "ready", False) else model.ready
        return y

    model, optimizer = made(notes)
    model.config = types.SimpleNamespace(kind=None)
    step = step_of(model, optimizer)
    for _ in range(3):
        assert step(*batch()).isfinite()
    assert (model.config.kind, model.ready, len(step.plans)) == ("set", True, 1)


def test_a_list_that_forward_makes_anew_of_the_same_is_no_change() -> None:
    def anchored(model: Plus, y: Tensor) -> Tensor:
        model.anchors = [anchor.to(y.dtype) for anchor in model.anchors]  # as torchvision's detectors do
        return y + sum(model.anchors)

    sides = [made(anchored) for _ in range(2)]
    step = step_of(*sides[1])
    for anchors in ([torch.ones(3)], [torch.ones(3), torch.arange(3.0)]):
        for model, _ in sides:
            model.anchors = list(anchors)
        for _ in range(2):
            loss = F.cross_entropy(sides[0][0](batch()[0]), batch()[1])
            loss.backward()
            sides[0][1].step()
            sides[0][1].zero_grad()
            assert same_bits(step(*batch()), loss.detach())
    assert len(step.plans) == 2


def test_what_is_otherwise_at_the_first_call_is_refused() -> None:
    def starts(model: Plus, y: Tensor) -> Tensor:
        if not model.started:
            model.started = True
            return y * 2
        return y

    model, optimizer = made(starts)
    model.started = False
    with pytest.raises(UnsupportedError, match=r"changes Plus\.started"):
        step_of(model, optimizer)(*batch())
    assert model.started is False


def test_a_cache_that_is_filled_already_may_stay() -> None:
    model, optimizer = made(caches)
    with pytest.raises(UnsupportedError, match=r"changes Plus\.cached"):
        step_of(model, optimizer)(*batch())
    model(batch()[0])
    assert step_of(model, optimizer)(*batch()).isfinite()


def test_what_forward_sets_and_nobody_read_is_not_kept() -> None:
    def sets(model: Plus, y: Tensor) -> Tensor:
        model.output = y
        model.shape = tuple(y.shape)
        return model.output * 2

    model, optimizer = made(sets)
    step = step_of(model, optimizer)
    step(*batch())
    assert model.shape == (6, 3)
    for use in (
        lambda: model.output + 1,
        lambda: torch.exp(model.output),
        lambda: model.output.mean(0),
        lambda: float(model.output),
    ):
        with pytest.raises(UnsupportedError, match=r"Plus\.output .*set"):
            use()
    assert isinstance(model.output, NotKept)
    model(batch()[0])
    assert model.output.shape == (6, 3)


def losses(make_loss: Callable[[], Any], change: Callable[[Any], Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Losses of a step and of plain training, with a change to the loss function between."""
    found: list[list[Tensor]] = []
    for plain in (False, True):
        model, optimizer = made()
        loss = make_loss()
        step = step_of(model, optimizer, loss)
        x, y = batch()
        values = []
        for index in range(4):
            if index == 2:
                change(loss)
            if plain:
                optimizer.zero_grad()
                value = loss(model, x, y)
                value.backward()
                optimizer.step()
            else:
                value = step(x, y)
            values.append(value.detach())
        found.append(values)
    return found[0], found[1]


def with_closure() -> Any:
    weight, shift = 1.0, torch.zeros(3)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return weight * F.cross_entropy(model(x) + shift, y)

    def put(number: float, tensor: Tensor) -> None:
        nonlocal weight, shift
        weight, shift = number, tensor

    loss.put = put  # type: ignore[attr-defined]
    return loss


def by_global(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return helper(F.cross_entropy(model(x), y))


def helper(value: Tensor) -> Tensor:
    return FACTOR * value


def by_default(model: nn.Module, x: Tensor, y: Tensor, *, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(model(x), y, label_smoothing=smoothing)


class Objective:
    """A loss that is an object with a method, and much besides that forward does not read."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.log: list[float] = []

    def __call__(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return self.scaled(F.cross_entropy(model(x), y))

    def scaled(self, value: Tensor) -> Tensor:
        return self.weight * value


def with_array() -> Any:
    numbers = np.ones(3, np.float32)

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x) * torch.tensor(numbers), y)

    loss.numbers = numbers  # type: ignore[attr-defined]
    return loss


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a number in a closure": (with_closure, lambda loss: loss.put(3.0, torch.zeros(3))),
    "a tensor in a closure": (with_closure, lambda loss: loss.put(1.0, torch.tensor([1.0, 0.0, -1.0]))),
    "a default": (lambda: functools.partial(by_default), lambda loss: loss.keywords.update(smoothing=0.3)),
    "an attribute of an object": (Objective, lambda loss: setattr(loss, "weight", 2.0)),
    "a method of an object": (lambda: Objective().__call__, lambda loss: setattr(loss.__self__, "weight", 2.0)),
    "an array in place": (with_array, lambda loss: loss.numbers.__setitem__(1, 5.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_loss_is_followed(name: str) -> None:
    found, expected = losses(*CHANGES[name])
    assert all(map(same_bits, found, expected))
    assert not same_bits(expected[1], expected[2])


def test_zero_and_minus_zero_are_not_the_same() -> None:
    model, optimizer = made(lambda model, y: y * math.copysign(2.0, model.sign))
    model.sign = 0.0
    step, (x, y) = step_of(model, optimizer), batch()
    step(x, y)
    model.sign = -0.0
    expected = F.cross_entropy(model(x), y).detach()
    assert same_bits(step(x, y), expected)


REPLACED: dict[str, tuple[Any, Any, str, Any, float]] = {
    "a global": (None, by_global, "FACTOR", 0.0, 0.0),
    "a function": (None, by_global, "helper", lambda value: value * 0, 0.0),
    "a function that an object of the step calls": (
        lambda _, y: Scales(1.0)(y), F.cross_entropy, "helper", lambda value: value * 0, math.log(3),
    ),
    "a method": (None, F.cross_entropy, "Plus.forward", lambda self, x: self.linear(x) * 0, math.log(3)),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLACED)
def test_what_is_replaced_is_followed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, loss, what, by, expected = REPLACED[name]
    model, optimizer = made(change)
    step = step_of(model, optimizer, loss)
    assert step(*batch()).item() not in (0, pytest.approx(math.log(3)))
    monkeypatch.setattr(f"{__name__}.{what}", by)
    assert step(*batch()).item() == pytest.approx(expected)


def test_an_object_that_knows_the_optimizer_changes_with_it_and_that_is_no_matter() -> None:
    model, optimizer = made(lambda model, y: y * model.trainer.factor)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model.trainer = types.SimpleNamespace(factor=2.0, optimizer=optimizer, schedule=schedule)
    step = step_of(model, optimizer)
    for _ in range(3):
        step(*batch())
        schedule.step()
    assert len(step.plans) == 1


def test_a_buffer_that_is_given_data_of_another_kind_is_noticed() -> None:
    model, optimizer = made(lambda model, y: y * model.factors)
    model.register_buffer("factors", torch.full((3,), 2.0))
    step = step_of(model, optimizer)
    step(*batch())
    model.factors.data = torch.full((1,), 3.0)
    other, _ = made(lambda model, y: y * model.factors)
    other.register_buffer("factors", torch.full((1,), 3.0))
    other.load_state_dict(model.state_dict())
    loss = F.cross_entropy(other(batch()[0]), batch()[1])
    assert torch.equal(step(*batch()), loss)


def test_plans_of_what_was_are_found_again() -> None:
    model, optimizer = made(lambda m, y: y * m.scale)
    step = step_of(model, optimizer)
    for scale in (1.0, 2.0, 1.0, 2.0):
        model.scale = scale
        step(*batch())
    assert len(step.plans) == 2


def test_a_change_at_every_step_is_told() -> None:
    model, optimizer = made(lambda m, y: y * m.scale)
    step = step_of(model, optimizer)

    def train(steps: int) -> None:
        for index in range(steps):
            model.scale = float(index)
            step(*batch())

    with pytest.warns(UserWarning, match=r"captured 9 times .* Plus\.scale"):
        train(10)


def test_what_forward_does_not_read_may_change() -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    for index in range(3):
        model.history = list(range(index))
        model.linear.note = index
        step(*batch())
    assert len(step.plans) == 1


DAMAGE: dict[str, Callable[[Plus], Any]] = {
    "a layer is deleted": lambda m: delattr(m, "linear"),
    "weight_norm": lambda m: nn.utils.parametrizations.weight_norm(m.linear),
    "a new layer": lambda m: setattr(m, "more", nn.Linear(2, 2)),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_model_with_other_parameters_is_refused_in_a_line(name: str) -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    DAMAGE[name](model)
    with pytest.raises(RequestError, match="anew") as refusal:
        step(*batch())
    assert "\n" not in str(refusal.value)


def test_amsgrad_switched_on_is_refused_in_a_line() -> None:
    model, _ = made()
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    step = step_of(model, optimizer)
    step(*batch())
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RequestError, match="max_exp_avg_sq"):
        step(*batch())
    optimizer.param_groups[0]["amsgrad"] = False
    assert step(*batch()).isfinite()


LOST: dict[str, Callable[[Tensor], Any]] = {
    "zero_": lambda w: w.zero_(), "fill_": lambda w: w.fill_(1), "masked_fill_": lambda w: w.masked_fill_(w != w, 0),
    "constant_": lambda w: nn.init.constant_(w, 0.5), "data.zero_": lambda w: w.data.zero_(), "detach().zero_": lambda w: w.detach().zero_(),
}  # fmt: skip


@pytest.mark.parametrize("name", LOST)
def test_a_write_through_a_reference_to_what_is_away_is_told(name: str) -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    held = model.linear.weight
    before = held.detach().clone()
    state = step._state
    state.residency.send(["model.linear.weight"], state.engine)
    state.arm()
    with torch.no_grad():
        LOST[name](held)
    with pytest.raises(RequestError, match=r"a reference .*synchronize\(\)"):
        step(*batch())
    step.synchronize()
    assert same_bits(held.detach(), before)
    assert step(*batch()).isfinite()


def test_a_write_to_state_that_is_there_is_not_taken_for_one_to_what_is_away() -> None:
    model, _ = made()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = step_of(model, optimizer)
    step(*batch())
    state = step._state
    state.residency.send(["model.linear.weight.momentum_buffer", "model.linear.bias.momentum_buffer"], state.engine)
    state.arm()
    optimizer.state[model.linear.bias]["momentum_buffer"].zero_()
    assert step(*batch()).isfinite()


def test_data_given_to_what_is_away_is_taken() -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    step(*batch())
    held, state = model.linear.weight, step._state
    state.residency.send(["model.linear.weight"], state.engine)
    state.arm()
    held.data = torch.zeros(3, 4)
    assert same_bits(model.linear.weight.detach(), torch.zeros(3, 4))
    step(*batch())
    assert held.detach().abs().max() < 1


def test_modules_read_as_ever_after_watching() -> None:
    model, _ = made()
    with watching() as state:
        model(batch()[0])
    assert state.changed() == ""
    assert "__getattribute__" not in vars(nn.Module)
    assert isinstance(nn.Module.__init__, types.FunctionType)
    model.linear.bias = None
    with pytest.raises(OverspillError, match="changes"), watching():
        counts(model, model(batch()[0]))
    assert "__getattribute__" not in vars(nn.Module)


def test_an_op_of_torch_may_look_its_overload_up_in_the_step() -> None:
    library = torch.library.Library("overspill_tests", "DEF")
    library.define("halved(Tensor x) -> Tensor")
    library.impl("halved", lambda x: x / 2, "CompositeImplicitAutograd")
    model, optimizer = made(lambda model, y: model.op(y))  # type: ignore[operator]
    model.op = torch.ops.overspill_tests.halved
    before = set(vars(model.op))
    loss = step_of(model, optimizer)(*batch())
    assert set(vars(model.op)) != before  # or there is nothing to forgive
    plain, _ = made(lambda _, y: y / 2)
    assert same_bits(loss, F.cross_entropy(plain(batch()[0]), batch()[1]).detach())
