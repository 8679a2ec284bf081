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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.step.plus import Plus, batch, made, step_of
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import OverspillError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.python_state import NotKept
from overspill.runtime.step.watching import watching


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


DRAWN = torch.Generator()


def seeds(_: Plus, y: Tensor) -> Tensor:
    DRAWN.manual_seed(3)
    return y + torch.rand(y.shape, generator=DRAWN)


class Counted(torch.autograd.Function):
    calls = 0
    backward = staticmethod(lambda _, gradient: gradient)

    @staticmethod
    def forward(_: Any, y: Tensor) -> Tensor:
        Counted.calls += 1
        return y * Counted.calls


@pytest.mark.parametrize(
    "change", [counts, caches, draws, draws_with_numpy, appends, seeds, lambda _, y: Counted.apply(y)]
)
def test_what_a_graph_would_do_once_is_refused(change: Callable[[Plus, Tensor], Tensor]) -> None:
    state = random.getstate()
    with pytest.raises(UnsupportedError, match=r"Plus\.\w+|of Python|DRAWN|Counted") as refusal:
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
    return width * 2.0


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


@pytest.mark.parametrize("make", [lambda: [2.0], lambda: (*[2.0],), lambda: {"a": [2.0]}["a"], lambda: [[2.0]]])
def test_which_of_two_equal_containers_it_is_is_asked_at_each_step(make: Callable[[], Any]) -> None:
    model, optimizer = made(lambda m, y: y * (2.0 if m.now is m.one else 3.0))
    model.one, model.two = make(), make()
    step = step_of(model, optimizer)
    for now in ("one", "two", "two", "one"):
        model.now = getattr(model, now)
        expected = F.cross_entropy(model(batch()[0]), batch()[1])
        assert same_bits(step(*batch()), expected.detach())
    model.one, model.two = make(), make()
    model.now = model.one
    step(*batch())
    assert len(step.plans) == 2, "what is arranged as before has its plan"


def test_whether_two_inputs_are_one_tensor_is_asked_at_each_step() -> None:
    model, optimizer = made()
    step = step_of(model, optimizer, lambda m, x, y, z: F.cross_entropy(m(x), y) * (2.0 if x is z else 3.0))
    x, y = batch()
    for other, factor in ((x, 2.0), (x.clone(), 3.0), (x, 2.0)):
        expected = F.cross_entropy(model(x), y) * factor
        assert same_bits(step(x, y, other), expected.detach())


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


FOUND = [1.0]


class Base:
    kept = shared = 1.0
    by_parent = lambda self: self.kept  # noqa: E731


class Settings(Base):
    """Numbers that its methods find where their own code does not name them."""

    __slots__ = ("slot",)
    asked = property(lambda self: self.kept)
    by_parent = lambda self: super().by_parent()  # noqa: E731
    by_property = lambda self: self.asked  # noqa: E731
    by_name = lambda self: getattr(self, "kept", 0.0)  # noqa: E731
    __call__ = static = staticmethod(lambda *_: FOUND[0])


SETTINGS = Settings()
READS: dict[str, tuple[Callable[[], float], Callable[[float], Any]]] = {
    "a parent's method": (SETTINGS.by_parent, partial(setattr, SETTINGS, "kept")),
    "a property": (SETTINGS.by_property, partial(setattr, SETTINGS, "kept")),
    "getattr": (SETTINGS.by_name, partial(setattr, SETTINGS, "kept")),
    "a slot": (lambda: SETTINGS.slot, partial(setattr, SETTINGS, "slot")),
    "a class": (lambda: Settings.shared, partial(setattr, Base, "shared")),
    "an object's class": (lambda: SETTINGS.shared, partial(setattr, Base, "shared")),
    "an object that is called": (SETTINGS, partial(FOUND.__setitem__, 0)),
    "a static method": (lambda: Settings.static(0), partial(FOUND.__setitem__, 0)),
}


@pytest.mark.parametrize("way", READS)
def test_what_functions_find_in_classes_is_followed(way: str) -> None:
    read, change = READS[way]
    model, optimizer = made(lambda _, y: y * read())
    step = step_of(model, optimizer)
    for value in (2.0, 3.0):
        change(value)
        expected = F.cross_entropy(model.linear(batch()[0]) * value, batch()[1])
        assert same_bits(step(*batch()), expected.detach())


def test_what_forward_does_not_read_may_change() -> None:
    model, optimizer = made()
    step = step_of(model, optimizer)
    for index in range(3):
        model.history = list(range(index))
        model.linear.note = index
        step(*batch())
    assert len(step.plans) == 1


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
