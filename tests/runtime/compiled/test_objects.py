"""What `overspill.compile` and `torch.compile` return behaves as users of PyTorch expect of a model."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.runtime.compiled.either_way import WAYS, Net, assert_same, batch, either_way, made, same_gradients, train
from tests.turns import by_turns, rest_long
from torch import Tensor, nn

import overspill
from overspill.core.errors import InfeasibleBudgetError, RequestError
from overspill.core.units import format_apart
from overspill.runtime.compiled.backend import backend_of
from overspill.runtime.reachable import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


# -- a budget that is too small


by_our_name = pytest.mark.parametrize("compiled_by", rest_long(WAYS.values(), [WAYS["overspill.compile"]]), ids=WAYS)
"""By both names in the long suite."""


@pytest.mark.short("overspill.compile")
@either_way
def test_a_budget_below_the_floor_is_an_infeasible_budget_that_names_graph_and_shapes(compiled_by: Any) -> None:
    compiled = {
        WAYS["overspill.compile"]: lambda m: overspill.compile(m, budget="64KiB"),
        WAYS["torch.compile"]: lambda m: torch.compile(
            m, backend="overspill", options={"budget": "64KiB"}, dynamic=False
        ),
    }[compiled_by](made())
    x, _ = batch()
    with pytest.raises(InfeasibleBudgetError, match="the training graph") as training:
        compiled(x)
    assert "\n" not in str(training.value)
    assert training.value.floor_bytes > training.value.budget_bytes == 64 * 1024
    assert " at " in training.value.cause
    compiled.eval()
    with torch.no_grad(), pytest.raises(InfeasibleBudgetError, match="evaluation graph"):
        compiled(x.repeat(16, 1, 1, 1))


def test_sizes_that_read_the_same_are_told_in_bytes() -> None:
    assert format_apart(2**20, 2**20 + 5) == ("1.0 MiB (1048576 bytes)", "1.0 MiB (1048581 bytes)")
    assert format_apart(2**20, 2**21) == ("1.0 MiB", "2.0 MiB")
    x, _ = batch()
    with pytest.raises(InfeasibleBudgetError) as first:
        overspill.compile(made(), budget="64KiB")(x)
    torch._dynamo.reset()
    least = first.value.floor_bytes
    with pytest.raises(InfeasibleBudgetError, match=rf"{least - 1} bytes.*{least}"):
        overspill.compile(made(), budget=least - 1)(x)


def test_an_unknown_option_of_torch_compile_is_a_request_error() -> None:
    with pytest.raises(RequestError, match="unknown option 'bugdet'"):
        torch.compile(made(), backend="overspill", options={"bugdet": "1GiB"})(batch()[0])


# -- copies and pickles


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.short("<lambda>-saved1")
@pytest.mark.parametrize(
    ("compiled_by", "copied"),
    [
        *by_turns(WAYS.values(), [copy.deepcopy, saved]),
        *(pytest.param(way, pickled, marks=pytest.mark.long) for way in WAYS.values()),
    ],
)
def test_a_copy_trains_by_itself_with_the_same_numbers(compiled_by: Any, copied: Any) -> None:
    plain = made()
    compiled = compiled_by(made())
    assert train(compiled) == train(plain)
    other, plain_copy = copied(compiled), copy.deepcopy(plain)
    assert type(other) is type(torch.compile(made()))
    assert_same(other, plain_copy)
    assert train(other, seed=8) == train(plain_copy, seed=8)
    assert_same(other, plain_copy)
    assert_same(compiled, plain)  # which the copy's training has left alone
    assert train(compiled, seed=9) == train(plain, seed=9)
    assert_same(compiled, plain)


@pytest.mark.long
def test_a_copy_has_the_options_and_a_plan_of_its_own() -> None:
    compiled = overspill.compile(made(), budget="1GiB", policy="vdnn-all", store="host", fullgraph=True)
    train(compiled)
    for other in (copy.deepcopy(compiled), pickled(compiled)):
        assert other.overspill.options == compiled.overspill.options
        assert other.overspill.plans == []
        train(other)
        assert len(other.overspill.plans) == 1
        assert other.overspill.engine is not compiled.overspill.engine
        assert other.overspill.engine.offloaded_bytes > 0
    assert len(compiled.overspill.plans) == 1


def scaled(x: Tensor) -> Tensor:
    return 2 * x


@pytest.mark.long
def test_a_compiled_function_is_its_own_copy_and_a_compiled_method_goes_with_its_object() -> None:
    function = overspill.compile(scaled, budget="1GiB")
    assert copy.deepcopy(function) is function
    model = made()
    model.forward = overspill.compile(model.forward, budget="1GiB", store="host")  # type: ignore[method-assign]
    for other in (copy.deepcopy(model), pickled(model)):
        nn.init.zeros_(other.head.weight)
        nn.init.ones_(other.head.bias)
        assert other(batch()[0]).eq(1).all()
        assert not model(batch()[0]).eq(1).all()


# -- what a module does


@either_way
def test_the_keys_of_a_state_dict_are_those_of_torch_compile_and_may_be_the_plain_models(compiled_by: Any) -> None:
    compiled, plain, other = compiled_by(made()), made(), made()
    assert list(compiled.state_dict()) == list(torch.compile(other).state_dict())
    train(plain)
    compiled._orig_mod.load_state_dict(plain.state_dict())
    other.load_state_dict(compiled._orig_mod.state_dict())
    assert_same(plain, other)
    assert train(compiled) == train(plain)


def test_a_plain_models_state_dict_may_be_loaded_into_a_compiled_one_wherever_that_is() -> None:
    plain = made()
    train(plain)
    compiled = overspill.compile(made(), budget="1GiB")
    train(compiled, steps=1)
    compiled.load_state_dict(plain.state_dict())
    assert_same(compiled, plain)
    inside = nn.ModuleDict({"net": overspill.compile(made(), budget="1GiB")})
    inside.load_state_dict(nn.ModuleDict({"net": plain}).state_dict())
    assert_same(inside, plain)
    inside.load_state_dict(inside.state_dict())
    with pytest.raises(RuntimeError, match="other"):
        compiled.load_state_dict({**plain.state_dict(), "other": torch.zeros(1)})
    assert train(compiled) == train(plain)


@by_our_name
def test_modes_names_and_conversions_are_those_of_the_plain_model(compiled_by: Any) -> None:
    plain, model = made(), made()
    compiled = compiled_by(model)
    assert compiled.eval() is compiled
    assert not any(m.training for m in model.modules())
    compiled.train()
    assert all(m.training for m in model.modules())
    assert [n.removeprefix("_orig_mod.") for n, _ in compiled.named_parameters()] == [
        n for n, _ in plain.named_parameters()
    ]
    assert compiled.head is model.head
    assert train(compiled) == train(plain)
    for each in (compiled, plain):
        each.to(torch.float64)
        assert each.head.weight.dtype is torch.float64

    def losses(call: Any) -> list[float]:
        torch.manual_seed(5)
        loss = call(batch()[0].double()).square().mean()
        loss.backward()
        return [loss.item()]

    assert losses(compiled) == losses(plain)
    assert same_gradients(model, plain)


Log = list[Tensor]


def keep(log: Log, *tensors: Any) -> None:
    log.extend(t.detach().clone() for t in tensors if t is not None)


HOOKS: dict[str, Callable[[Net, Log], Any]] = {
    "forward": lambda m, _: m.middle.register_forward_hook(lambda _m, _i, out: 2 * out),
    "forward pre": lambda m, _: m.middle.register_forward_pre_hook(lambda _m, args: (3 * args[0],)),
    "forward of all": lambda m, log: m.register_forward_hook(lambda _m, _i, out: keep(log, out)),
    "backward": lambda m, _: m.middle.register_full_backward_hook(lambda _m, grads, _o: (2 * grads[0],)),
    "backward pre": lambda m, _: m.middle.register_full_backward_pre_hook(lambda _m, grads: (2 * grads[0],)),
    "backward that keeps": lambda m, log: m.middle.register_full_backward_hook(lambda _m, _i, out: keep(log, *out)),
    "backward of all": lambda m, log: m.register_full_backward_hook(lambda _m, _i, out: keep(log, *out)),
    "tensor": lambda m, _: m.head.weight.register_hook(lambda grad: 2 * grad),
    "post accumulate": lambda m, log: m.head.weight.register_post_accumulate_grad_hook(lambda p: keep(log, p.grad)),
}


@pytest.mark.short("forward-True", "tensor-True")
@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.long) if " " in k else k for k in HOOKS])
def test_hooks_do_what_they_do_in_plain_training_whenever_they_were_registered(kind: str, late: bool) -> None:
    logs: list[Log] = []
    losses = []
    models = made(), made()
    for model in models:
        logs.append([])
        call = model if model is models[0] else overspill.compile(model, budget="1GiB", store="host")
        if late:
            train(call, seed=6)
        HOOKS[kind](model, logs[-1])
        losses.append(train(call))
    assert losses[0] == losses[1]
    assert_same(*models)
    assert len(logs[0]) == len(logs[1])
    assert all(map(same_bits, *logs))


# -- averages


def exponential(average: Tensor, parameter: Tensor, _number: Any) -> Tensor:
    return 0.9 * average + 0.1 * parameter


@pytest.mark.long
@by_our_name
def test_averages_of_a_compiled_model_are_those_of_the_plain_one(compiled_by: Any) -> None:
    results = []
    for call in (made(), compiled_by(made())):
        swa = torch.optim.swa_utils.AveragedModel(call)
        ema = torch.optim.swa_utils.AveragedModel(call, avg_fn=exponential, use_buffers=True)
        own = copy.deepcopy(call).requires_grad_(False)
        for seed in range(3):
            train(call, steps=1, seed=seed)
            swa.update_parameters(call)
            ema.update_parameters(call)
            with torch.no_grad():
                for average, parameter in zip(own.parameters(), call.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
        with torch.no_grad():
            outputs = [model.eval()(batch()[0]) for model in (swa, ema, own)]
        results.append([*outputs, *swa.parameters(), *ema.parameters(), *ema.buffers(), *own.parameters()])
    assert all(map(same_bits, *results))


# -- optimizers that evaluate the model themselves


def train_by_lbfgs(call: Any) -> list[Tensor]:
    optimizer = torch.optim.LBFGS(call.parameters(), lr=0.1, max_iter=4)
    x, y = batch()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        return loss

    torch.manual_seed(2)
    losses = [torch.as_tensor(optimizer.step(closure)).detach() for _ in range(2)]
    return [*losses, *call.parameters()]


def test_lbfgs_trains_a_compiled_model_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        compiled = train_by_lbfgs(overspill.compile(made(), budget="1GiB", store="host"))
    assert all(map(same_bits, compiled, train_by_lbfgs(made())))


@pytest.mark.long
def test_parameters_that_were_assigned_anew_are_those_whose_gradients_are_looked_for() -> None:
    compiled, plain = overspill.compile(made(), budget="1GiB"), made()
    train(compiled, steps=1)
    weights = made().state_dict()
    for call in (compiled, plain):
        call.load_state_dict({k: v.clone() for k, v in weights.items()}, assign=True)
    assert train(compiled) == train(plain)
    assert_same(compiled, plain)
    compiled.zero_grad(set_to_none=False)
    assert compiled.overspill.gradients_are_kept()


def test_the_arguments_of_a_compiled_model_can_be_looked_up() -> None:
    class Model(nn.Linear):
        def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Tensor:
            return super().forward(inputs) if labels is None else super().forward(inputs) - labels

    model = Model(2, 2)
    assert list(inspect.signature(overspill.compile(model).forward).parameters) == ["inputs", "labels"]
    assert list(inspect.signature(overspill.compile(model.forward)).parameters) == ["inputs", "labels"]


def test_how_a_model_was_compiled_can_be_copied_and_pickled() -> None:  # Lightning leaves that in every model
    session = overspill.Session(budget="1GiB", policy="vdnn-all", store="host")
    backend = backend_of(session)
    assert copy.deepcopy(backend) is backend
    again = pickle.loads(pickle.dumps(backend))
    plain, model = made(), made()
    compiled = torch.compile(model, backend=again, dynamic=False)
    torch.manual_seed(1)
    expected = F.cross_entropy(plain(batch()[0]), batch()[1])
    torch.manual_seed(1)
    assert same_bits(F.cross_entropy(compiled(batch()[0]), batch()[1]).detach(), expected.detach())
    assert not session.plans
