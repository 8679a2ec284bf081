"""What an optimizer is said to need, beside what it takes when it really steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from overspill.capture.recording.graph import graph_of
from overspill.capture.virtual_gpu.record import record
from overspill.core import Phase, TensorKind
from overspill.estimation.programs import program_of
from overspill.job import Job, NamedModel
from overspill.runtime import optimizers
from overspill.runtime.optimizers import OptimizerNeeds, find_optimizers, optimizer_needs, unwrapped
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.runtime.step.trials import Trials
from overspill.runtime.tracker import LiveBytes

optim = torch.optim
Make = Callable[[Any], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: optim.SGD(p, lr=0.01),
    "SGD, weight decay": lambda p: optim.SGD(p, lr=0.01, weight_decay=0.1),
    "SGD, momentum": lambda p: optim.SGD(p, lr=0.01, momentum=0.9),
    "SGD, nesterov": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "SGD, momentum, foreach": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "Adam": lambda p: optim.Adam(p, lr=1e-3),
    "Adam, foreach": lambda p: optim.Adam(p, lr=1e-3, foreach=True),
    "Adam, fused": lambda p: optim.Adam(p, lr=1e-3, fused=True),
    "AdamW, amsgrad": lambda p: optim.AdamW(p, lr=1e-3, amsgrad=True),
    "AdamW, maximize": lambda p: optim.AdamW(p, lr=1e-3, maximize=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: optim.RMSprop(p, lr=0.01),
    "RMSprop, momentum, centered": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "Adadelta": optim.Adadelta,
    "NAdam": optim.NAdam,
    "RAdam": optim.RAdam,
    "Adamax": optim.Adamax,
    "ASGD": optim.ASGD,
    "Rprop": optim.Rprop,
    "Adafactor": optim.Adafactor,
}
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "one matrix": [(96, 80)],
    "a small network": [(64, 3, 5, 5), (64,), (128, 64), (128,)],
    "every dimension": [(), (33,), (40, 50), (6, 7, 8), (9, 8, 7, 3)],
    "many of one size": [(50, 60)] * 6,
}


@pytest.fixture(autouse=True)
def _tried_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another test has measured is measured again."""
    monkeypatch.setattr(optimizers, "_MEASURED", {})


def parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.full(shape, 0.5, dtype=dtype, requires_grad=True) for shape in shapes]


def states(optimizer: Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def real_needs(optimizer: Optimizer) -> OptimizerNeeds:
    """State bytes after a first real step, and the most temporary bytes during some more; RAdam's are most from the sixth on."""
    held = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in held:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tracker = LiveBytes(torch.device("cpu"))
    tracker.add([*held, *(p.grad for p in held), *states(optimizer)])
    settled = tracker.live_bytes
    with tracker:
        for _ in range(6):
            optimizer.step()
    return OptimizerNeeds(sum(t.numel() * t.element_size() for t in states(optimizer)), tracker.peak_bytes - settled)


@pytest.mark.parametrize(("name", "shapes"), by_turns(OPTIMIZERS, SHAPES))
def test_the_state_is_foretold_to_the_byte_and_the_temporaries_from_above_within_a_factor_of_two(
    name: str, shapes: str
) -> None:
    optimizer = OPTIMIZERS[name](parameters(SHAPES[shapes]))
    foretold, real = optimizer_needs([optimizer]), real_needs(optimizer)
    assert foretold.state_bytes == real.state_bytes
    scalars = 512  # step counts and the like
    assert real.update_bytes <= foretold.update_bytes <= 2 * real.update_bytes + scalars


@pytest.mark.parametrize(("name", "dtype"), by_turns(OPTIMIZERS, [torch.float64, torch.bfloat16, torch.float16]))
def test_the_state_is_foretold_for_other_dtypes(name: str, dtype: torch.dtype) -> None:
    optimizer = OPTIMIZERS[name](parameters(SHAPES["a small network"], dtype))
    foretold = optimizer_needs([optimizer])
    assert foretold.state_bytes == real_needs(optimizer).state_bytes


@pytest.mark.parametrize(
    "make", [optim.RAdam, lambda p: optim.Adamax(p, foreach=True), type("AnotherRAdam", (optim.RAdam,), {})]
)
def test_what_is_tried_while_a_model_is_compiled_is_the_eager_step(make: Make) -> None:
    model = torch.nn.Linear(8, 8)
    optimizer, found = make(model.parameters()), []

    def tried() -> None:
        optimizers._MEASURED.clear()
        (trials := Trials(optimizer)).look_again()
        found.append((optimizer_needs([optimizer]), [tiny.peak_bytes for tiny in trials._apart], trials.why_together))

    def backend(graph: Any, _: Any) -> Any:
        tried()
        return graph

    tried()
    torch.compile(model, backend=backend)(torch.ones(2, 8))
    assert found[0] == found[1]


def test_groups_with_settings_of_their_own_add_up() -> None:
    first, second, third = parameters([(30, 40), (50,), (7, 8)])
    groups = [{"params": [first, second], "momentum": 0.9}, {"params": [third], "lr": 0.5}]
    optimizer = optim.SGD(groups, lr=0.01)
    assert optimizer_needs([optimizer]).state_bytes == real_needs(optimizer).state_bytes == 4 * (30 * 40 + 50)


def test_one_group_may_mix_dtypes() -> None:
    optimizer = optim.Adam([*parameters([(30, 40), (5,)]), *parameters([(30, 40)], torch.bfloat16)])
    assert optimizer_needs([optimizer]).state_bytes == real_needs(optimizer).state_bytes


def test_what_needs_no_gradient_needs_no_state() -> None:
    trained, frozen = parameters([(10, 10), (1000, 10)])
    frozen.requires_grad_(False)
    assert optimizer_needs([optim.Adam([trained, frozen])]).state_bytes == 2 * 400 + 4
    assert optimizer_needs([optim.Adam([frozen])]) == OptimizerNeeds(0, 0)


def test_what_is_frozen_for_now_keeps_its_state() -> None:
    first, second = parameters([(10, 10), (1000, 10)])
    optimizer = optim.Adam([first, second])
    whole = optimizer_needs([optimizer])
    second.requires_grad_(False)
    assert optimizer_needs([optimizer], {id(second)}).state_bytes == whole.state_bytes
    assert optimizer_needs([optimizer], {id(second)}).update_bytes < whole.update_bytes
    second.grad = torch.ones_like(second)
    optimizer.step()
    assert optimizer_needs([optimizer]).state_bytes == whole.state_bytes


def test_a_learning_rate_scheduler_does_not_disturb() -> None:
    optimizer = optim.SGD(parameters([(10, 10)]), lr=0.1, momentum=0.9)
    optim.lr_scheduler.StepLR(optimizer, 1)
    assert optimizer_needs([optimizer]).state_bytes == 400


def test_a_learning_rate_may_be_a_tensor() -> None:
    optimizer = optim.Adam(parameters([(10, 10)]), lr=torch.tensor(1e-3))
    assert optimizer_needs([optimizer]).state_bytes == real_needs(optimizer).state_bytes


def test_optimizers_add_their_states_and_share_the_room_for_temporaries() -> None:
    first, second = optim.Adam(parameters([(10, 10)])), optim.Adam(parameters([(20, 20)]))
    one, two, both = optimizer_needs([first]), optimizer_needs([second]), optimizer_needs([first, second])
    state, moved = one.state_bytes + two.state_bytes, one.moved_bytes + two.moved_bytes
    assert both == OptimizerNeeds(state, max(one.update_bytes, two.update_bytes), moved)


def test_asking_changes_nothing() -> None:
    (parameter,) = held = parameters([(4, 5)])
    optimizer = optim.Adam(held, lr=0.1)
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    optimizer_needs([optimizer])
    assert optimizer.state == {}
    assert parameter.grad is None
    assert torch.equal(parameter, torch.full((4, 5), 0.5))
    assert torch.equal(torch.random.get_rng_state(), before)


class Lopsided(Optimizer):
    """An optimizer by a user: one state of a row, one of a column, one of fixed size, and an argument of its own."""

    def __init__(self, params: Any, lr: float, twist: float = 2.0) -> None:
        super().__init__(params, {"lr": lr, "twist": twist})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {
                        "row": p.new_zeros(p.shape[0]),
                        "column": p.new_zeros(p.shape[-1]),
                        "fixed": p.new_zeros(17),
                        "n": 0,
                    }
                with torch.no_grad():
                    p.sub_(p.grad * group["lr"])


def test_an_optimizer_of_the_users_own_is_foretold() -> None:
    optimizer = Lopsided(parameters([(30, 40), (20, 50)]), lr=0.1)
    foretold, real = optimizer_needs([optimizer]), real_needs(optimizer)
    assert foretold.state_bytes == real.state_bytes
    assert real.update_bytes <= foretold.update_bytes <= 2 * real.update_bytes + 512


def test_only_optimizers_that_hold_the_parameters_are_found() -> None:
    mine, others = parameters([(2, 3), (4,)]), parameters([(2, 3)])
    first, second, foreign = (
        optim.SGD(mine[:1], lr=0.1),
        Lopsided([*mine[1:], *others], lr=0.1),
        optim.SGD(others, lr=0.1),
    )
    found = find_optimizers(mine)
    assert {id(o) for o in found} == {id(first), id(second)}
    assert foreign not in found
    assert find_optimizers(parameters([(2, 3)])) == []


class Shown(Optimizer):
    """Shows another optimizer's state as its own, as accelerate's does."""

    def __init__(self, inside: Optimizer) -> None:
        self.inside = inside

    param_groups = property(lambda self: self.inside.param_groups)
    state = property(lambda self: self.inside.state)


def test_what_is_only_wrapped_around_an_optimizer_is_not_another() -> None:
    parameter = torch.ones(3, requires_grad=True)
    adam = optim.Adam([parameter])
    wrapped = Shown(Shown(adam))
    assert find_optimizers([parameter]) == [adam]
    assert unwrapped(wrapped) is adam


def test_an_optimizer_with_state_of_its_own_is_no_mere_wrapper() -> None:
    parameter = torch.ones(3, requires_grad=True)
    adam = optim.Adam([parameter])
    slow = optim.SGD([parameter], lr=0.01, momentum=0.9)
    slow.fast = adam
    assert unwrapped(slow) is slow
    assert {id(o) for o in find_optimizers([parameter])} == {id(adam), id(slow)}


class Renamed(torch.optim.SGD):
    """An optimizer that calls its learning rate something else."""

    def __init__(self, params: Any, speed: float) -> None:
        super().__init__(params, lr=speed, momentum=0.9)


@pytest.mark.parametrize(
    "make", [optim.SparseAdam, lambda p: optim.Adam(p, capturable=True)]
)  # fmt: skip
def test_an_optimizer_that_cannot_be_tried_out_is_no_crash(make: Make) -> None:
    with pytest.warns(UserWarning, match="tiny parameters"):
        assert optimizer_needs([make(parameters([(10, 10)]))]).state_bytes == 2 * 400


def test_an_optimizer_is_tried_whatever_its_constructor_takes() -> None:
    assert optimizer_needs([Renamed(parameters([(10, 10)]), 0.1)]).state_bytes == 400


def test_a_parameter_may_have_more_than_six_dimensions() -> None:
    optimizer = optim.Adam(parameters([(2, 1, 3, 1, 2, 1, 5)]))
    assert optimizer_needs([optimizer]).state_bytes == real_needs(optimizer).state_bytes


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("history", [1, 5])
def test_lbfgs_needs_its_history_and_is_not_tried(
    line_search: str | None, history: int, recwarn: pytest.WarningsRecorder
) -> None:
    torch.manual_seed(0)
    held = [torch.randn(2048, requires_grad=True), torch.randn(1024, 2, requires_grad=True)]
    optimizer = optim.LBFGS(held, lr=0.5, history_size=history, line_search_fn=line_search)
    needs = optimizer_needs([optimizer])
    assert not recwarn.list
    slopes = [torch.linspace(0.1, 4, p.numel()).view_as(p) for p in held]
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    tracker = LiveBytes(torch.device("cpu"))
    tracker.add([*held, *(p.grad for p in held), *slopes])
    before = tracker.live_bytes
    at_evaluations = []

    def closure() -> Tensor:
        at_evaluations.append(tracker.live_bytes - before)
        loss = torch.zeros(())
        with torch.no_grad():
            for parameter, slope in zip(held, slopes, strict=True):
                torch.mul(parameter, slope, out=parameter.grad)
                loss += parameter.grad.mul_(parameter).sum()
                torch.mul(parameter, slope, out=parameter.grad).mul_(2)
        return loss

    with tracker:
        for _ in range(2):
            optimizer.step(closure)
    assert needs.state_bytes / 2 < max(at_evaluations) <= needs.state_bytes
    assert tracker.peak_bytes - before <= needs.state_bytes + needs.update_bytes


def test_equal_optimizers_of_torch_share_a_trial_and_any_other_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(optim.AdamW):
        """May look at anything."""

    steps: list[Optimizer] = []
    own_step = optimizers.own_step
    monkeypatch.setattr(optimizers, "own_step", lambda optimizer: (steps.append(optimizer), own_step(optimizer)))

    def is_tried(of: Make = optim.AdamW, dtype: torch.dtype = torch.float32, **settings: Any) -> bool:
        before = len(steps)
        optimizer = of(parameters([(8, 6)], dtype))
        optimizer.param_groups[0].update(settings)
        optimizer_needs([optimizer])
        return len(steps) > before

    assert is_tried()
    assert not is_tried()
    assert not is_tried(lr=0.5)
    others = [{"amsgrad": True}, {"foreach": True}, {"weight_decay": 0}, {"dtype": torch.bfloat16}, {"of": optim.Adam}]
    assert [(is_tried(**other), is_tried(**other)) for other in others] == [(True, False)] * 5
    untold = [{"lr": torch.tensor(0.1)}, {"of": Own}, {"noted": [1]}]
    assert [(is_tried(**other), is_tried(**other)) for other in untold] == [(True, True)] * 3
    monkeypatch.setattr(optim.Adam, "step", lambda self: None)
    assert is_tried(optim.Adam)


def test_hooks_of_all_optimizers_do_not_hear_of_what_is_tried() -> None:
    heard: list[Optimizer] = []
    handles = (
        register_optimizer_step_pre_hook(lambda o, *_: heard.append(o)),
        register_optimizer_step_post_hook(lambda o, *_: heard.append(o)),
    )
    try:
        optimizer = optim.AdamW(parameters([(8, 6), (5,)]))
        optimizer.register_step_post_hook(lambda o, *_: heard.append(o))
        assert optimizer_needs([optimizer]).state_bytes > 0
        assert heard == []
        optimizer.step()
        assert heard == [optimizer] * 3
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.long
def test_a_plan_for_a_gpu_has_the_update_that_is_made_there_of_all_parameters_at_once() -> None:
    job = Job(NamedModel("decoder:width=32,depth=4,heads=2,vocabulary=32,seq_len=8"), 1, "adamw")

    def update_bytes(device: str) -> int:
        graph = step_of(job, Options(device=device)).graph
        return max(op.workspace_bytes for op in graph.ops if op.phase is Phase.UPDATE)

    assert update_bytes("t4") > update_bytes("cpu")


ADAMW = {"foreach": 20, "fused": 7, "for-loop": 20}
"""How often AdamW reads or writes what is as large as the weights: decay 2, average 3, square 2 and 3, root 2, two
scalings 4, step 4; one kernel reads four and writes three."""


@pytest.mark.short("fused")
@pytest.mark.parametrize("how", ADAMW)
def test_an_update_moves_the_same_bytes_in_each_capture(how: str) -> None:
    flags = {"fused": True} if how == "fused" else {"foreach": False} if how == "for-loop" else {}
    job = Job(NamedModel("gpt2", small=True), 2, lambda p: optim.AdamW(p, **flags))
    recorded = graph_of(record(program_of(job)), "recorded")
    steps = [step_of(job, Options(device="t4", whole_step=whole)).graph for whole in (False, True)]
    for graph in (recorded, *steps):
        weights = sum(t.nbytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)
        moved = sum(op.moved_bytes for op in graph.ops if op.phase is Phase.UPDATE)
        assert moved == pytest.approx(ADAMW[how] * weights, rel=1e-3)
    on_host = sum(op.moved_on_host_bytes for op in steps[1].ops)
    assert on_host == pytest.approx((7 if how == "fused" else 20) * weights, rel=1e-3)
