"""Between steps, whoever reads the model or the optimizer sees current values; and a closed step leaves no trace."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from tests.runtime.compiled.test_objects import pickled, saved
from tests.runtime.step.whole_steps import OPTIMIZERS, Cnn, Mlp, Pair, differences, made, planned_peak
from torch import Tensor, nn

import overspill
from overspill.core.errors import RequestError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.away import Away, hide, show, watch
from overspill.runtime.step.residency import Guarded


@pytest.fixture
def pair() -> Pair:
    """Two steps by each side; the managed one's weights and state are in the store."""
    found = Pair(Mlp, options={"budget": 0.6})
    found.train(2)
    assert found.step._state.residency.away()
    return found


def through_parameters(model: nn.Module) -> nn.Module:
    vector = nn.utils.parameters_to_vector(model.parameters())
    other = copy.deepcopy(made())
    nn.utils.vector_to_parameters(vector, other.parameters())
    other.load_state_dict({**other.state_dict(), **dict(model.named_buffers())})
    return other


def by_attribute(model: nn.Module) -> nn.Module:
    other = made()
    with torch.no_grad():
        other.first.weight.copy_(model.first.weight)
        for mine, of in zip(other.middle, model.middle, strict=True):
            mine.weight.copy_(of.weight)
        other.first.bias.copy_(model.first.bias)
        other.last.weight.copy_(model.get_parameter("last.weight"))
        other.last.bias.copy_(model.last.bias)
        other.norm.weight.copy_(dict(model.norm.named_parameters())["weight"])
        other.norm.bias.copy_(list(model.norm.parameters())[1])
    other.load_state_dict({**other.state_dict(), **dict(model.named_buffers())})
    return other


def loaded(model: nn.Module) -> nn.Module:
    other = made()
    other.load_state_dict(model.state_dict())
    return other


READERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "state_dict": loaded,
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": saved,
    "parameters_to_vector": through_parameters,
    "attributes": by_attribute,
}


@pytest.mark.short("deepcopy", "state_dict", "attributes")
@pytest.mark.parametrize("reader", READERS)
def test_copies_have_the_current_values_and_no_guards(pair: Pair, reader: str) -> None:
    other = READERS[reader](pair.model)
    assert not any(isinstance(m._parameters, Guarded) for m in other.modules())
    expected = pair.plain.model.state_dict()
    assert [n for n, v in other.state_dict().items() if not same_bits(v, expected[n])] == []
    pair.train(2)
    pair.assert_same()


@pytest.mark.short("True")
@pytest.mark.parametrize("compiled", [False, True])
def test_evaluation_between_steps_sees_current_values(pair: Pair, compiled: bool) -> None:
    call = torch.compile(pair.model, backend="eager") if compiled else pair.model
    for _ in range(2):
        for model in (pair.plain.model, pair.model):
            model.eval()
        with torch.no_grad():
            assert torch.equal(call(pair.inputs[0]), pair.plain.model(pair.inputs[0]))
        for model in (pair.plain.model, pair.model):
            model.train()
        pair.train(2)
    pair.assert_same()
    torch._dynamo.reset()


def test_synchronize_brings_all_back_to_tensors_that_the_user_holds() -> None:
    pair = Pair(Mlp)
    held = dict(pair.model.named_parameters())
    pair.train(2)
    away = [n for n in held if f"model.{n}" in pair.step._state.residency.away()]
    assert away
    with torch._C.DisableTorchFunctionSubclass():
        assert all(held[n].isnan().all() for n in away)  # what is read past the guards is no plausible number
    pair.step.synchronize()
    assert pair.step._state.residency.away() == []
    expected = dict(pair.plain.model.named_parameters())
    assert all(same_bits(p, expected[n]) for n, p in held.items())


def test_optimizer_state_may_be_loaded_between_steps(pair: Pair) -> None:
    kept = copy.deepcopy(pair.plain.optimizer.state_dict())
    pair.train(2)
    for optimizer in (pair.plain.optimizer, pair.optimizer):
        optimizer.load_state_dict(copy.deepcopy(kept))
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
def test_a_state_dict_that_is_held_follows_the_training_and_costs_nothing(pair: Pair) -> None:
    held = [
        (m.state_dict(), o.state_dict()["state"])
        for m, o in ((pair.plain.model, pair.plain.optimizer), (pair.model, pair.optimizer))
    ]
    peak = pair.measured_peak()
    pair.train()
    assert pair.measured_peak() == peak <= planned_peak(pair.step)
    (weights, state), (ours, our_state) = held
    assert all(same_bits(value, ours[name]) for name, value in weights.items())
    assert all(same_bits(v, our_state[n][key]) for n, of in state.items() for key, v in of.items())
    assert copy.deepcopy(ours).keys() == weights.keys()


@pytest.mark.long
def test_a_plain_step_of_the_optimizer_between_whole_steps_is_taken_up(pair: Pair) -> None:
    for model, optimizer in ((pair.plain.model, pair.plain.optimizer), (pair.model, pair.optimizer)):
        model.eval()
        optimizer.zero_grad()
        model(pair.inputs[0]).sum().backward()
        optimizer.step()
        model.train()
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
def test_gradients_are_the_steps_own(pair: Pair) -> None:
    pair.model(pair.inputs[0]).sum().backward()
    pair.plain.model(pair.inputs[0])
    pair.train()
    assert all(p.grad is None for p in pair.model.parameters())


def test_buffers_may_be_replaced_between_steps(pair: Pair) -> None:
    for model in (pair.plain.model, pair.model):
        model.norm.running_mean = torch.ones(32)
    pair.train(2)
    pair.assert_same()


def test_closing_leaves_plain_dictionaries_and_current_values(pair: Pair) -> None:
    pair.step.close()
    assert all(type(m._parameters) is dict for m in pair.model.modules())
    assert all(type(of) is dict for of in pair.optimizer.state.values())
    assert differences(pair.plain.model, pair.plain.optimizer, pair.model, pair.optimizer) == []
    with pytest.raises(RequestError, match="closed"):
        pair.step(*pair.inputs)


@pytest.mark.long
def test_another_step_may_follow_a_closed_one() -> None:
    pair = Pair(Mlp, OPTIMIZERS["momentum"], options={"budget": 0.6})
    pair.train(2)
    pair.step.close()
    pair.make_step()
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
def test_a_step_that_is_closed_has_no_arena_when_the_rest_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(Mlp, OPTIMIZERS["adamw"], options={"budget": 0.7, "placement": "planned"})
    pair.train(2)
    state, arena, found = pair.step._state, pair.step._plans.arena, list[int]()
    usual = state.synchronize

    def synchronize() -> None:
        assert state.residency.away()
        found.append(arena.nbytes)
        usual()

    assert arena.nbytes
    monkeypatch.setattr(state, "synchronize", synchronize)
    pair.step.close()
    assert found == [0]
    assert differences(pair.plain.model, pair.plain.optimizer, pair.model, pair.optimizer) == []


def test_a_closed_step_is_the_plain_loop_again() -> None:
    pair = Pair(Cnn, gradients={"accumulate": 2})
    pair.train(2)
    pair.step.close()
    pair.step = type(pair.plain)(pair.model, pair.optimizer, accumulate=2)  # type: ignore[assignment]
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
def test_state_made_by_one_step_is_read_as_it_is(pair: Pair) -> None:
    expected = {id(p): of for p, of in pair.plain.optimizer.state.items()}
    names = dict(pair.plain.model.named_parameters())
    for name, parameter in pair.model.named_parameters():
        mine: dict[str, Tensor] = pair.optimizer.state.get(parameter, {})
        other = expected.get(id(names[name]), {})
        assert list(mine) == list(other)
        assert all(same_bits(v, other[k]) for k, v in mine.items())


def test_a_step_that_was_never_called_changes_nothing() -> None:
    model = made()
    step = overspill.train_step(model, None, OPTIMIZERS["adamw"](model.parameters()))
    step.synchronize()
    step.close()
    assert all(type(m._parameters) is dict for m in model.modules())


@pytest.mark.usefixtures("forget_compiled_code")
def test_what_dynamo_leaves_to_eager_is_not_compiled_where_a_weight_is_away() -> None:
    class Brings:
        def fetch(self, *, loops: bool = False) -> None:
            del loops
            show(weight)

    def called(x: Tensor) -> Tensor:
        for _ in range(2):  # a break in a loop: Dynamo runs the whole function as it is
            torch._dynamo.graph_break()
            x = nn.functional.layer_norm(x, (4,), weight)
        return x

    graphs = []

    def backend(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    weight, guard = nn.Parameter(torch.ones(4)), Brings()
    watch(weight, guard)
    hide(weight)
    torch.compile(called, backend=backend)(torch.ones(2, 4))
    assert not isinstance(weight, Away)
    assert graphs == []
