"""A train step, and the model and the optimizer that it has, behave as users of PyTorch expect of such objects."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Mlp, Pair, Plain, batch_for, made
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

import overspill
from overspill.core.errors import OverspillError, RequestError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.residency import Guarded
from overspill.runtime.tracker import LiveBytes

# -- a step that is dropped


def test_a_dropped_step_brings_all_back_and_frees_what_it_had() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    assert pair.step._state.residency.away()
    engine, step = weakref.ref(pair.step.engine), weakref.ref(pair.step)
    store, threads = weakref.ref(pair.step.engine.store), threading.active_count()
    del pair.step
    assert step() is None
    gc.collect()  # the plans' graphs are circles
    assert engine() is store() is None
    assert threading.active_count() < threads
    assert not any(isinstance(m._parameters, Guarded) for m in pair.model.modules())
    assert all(type(of) is dict for of in pair.optimizer.state.values())
    assert pair.optimizer._optimizer_step_pre_hooks == {}
    pair.assert_same()
    pair.step = Plain(pair.model, pair.optimizer)  # type: ignore[assignment]
    pair.train(2)
    pair.assert_same()


@pytest.mark.long
@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_step_that_is_collected_in_the_trace_of_another_model_brings_all_back() -> None:
    pair = Pair(Mlp)
    pair.train(2)

    def traced(x: Tensor) -> Tensor:
        vars(pair).pop("step", None)
        return x.sin()

    aot_function(traced, fw_compiler=lambda graph, _: graph)(torch.randn(3, requires_grad=True))
    gc.collect()
    assert not any(isinstance(m._parameters, Guarded) for m in pair.model.modules())
    pair.assert_same()


@pytest.mark.long
@pytest.mark.parametrize("closed", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_second_step_goes_on_where_the_first_ended(closed: bool) -> None:
    pair = Pair(Mlp, options={"budget": 0.6})
    pair.train(2)
    if closed:
        pair.step.close()
    del pair.step
    pair.make_step()
    pair.train(2)
    pair.assert_same()


def test_a_step_that_is_dropped_with_its_model_and_optimizer_reads_nothing_back() -> None:
    pair = Pair(Mlp)
    pair.train(2)
    engine, model, step = pair.step.engine, weakref.ref(pair.model), pair.step
    read = engine.prefetched_bytes
    del pair
    gc.collect()
    assert model() is not None
    del step
    assert model() is None
    assert engine.prefetched_bytes == read


def test_an_unfinished_step_that_is_dropped_leaves_what_it_had_updated() -> None:
    class Failing(Exception):
        pass

    pair = Pair(Mlp)
    pair.train(1)

    def interrupted() -> Any:
        raise Failing

    ((compiled,),) = pair.step._plans._compiled.values()
    count = 0
    for instruction in compiled.program.instructions:
        count += 1
        if instruction.mutation is not None:
            break
    position = count + 1
    node = compiled.program.instructions[position]
    compiled.program.instructions[position] = node._replace(target=lambda *_, **__: interrupted())
    with pytest.raises(Failing):
        pair.step(*pair.inputs)
    assert pair.step.is_unfinished
    del pair.step
    assert all(p.isfinite().all() for p in pair.model.parameters())
    pair.make_step()
    pair.step(*pair.inputs)


# -- hooks behind the optimizer's step


@pytest.fixture
def heard() -> Iterator[dict[int, list[list[Tensor]]]]:
    """What a hook on all optimizers has seen of each optimizer's parameters and state."""
    found: dict[int, list[list[Tensor]]] = {}

    def note(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        assert (args, kwargs) == ((optimizer,), {})
        tensors = [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for of in optimizer.state.values() for v in of.values() if isinstance(v, Tensor)]
        found.setdefault(id(optimizer), []).append([t.detach().clone() for t in tensors])

    handle = register_optimizer_step_post_hook(note)
    yield found
    handle.remove()


@pytest.mark.parametrize("accumulate", [pytest.param(1, marks=pytest.mark.long), 2])
def test_hooks_behind_the_step_are_called_once_with_what_plain_training_shows_them(heard: Any, accumulate: int) -> None:
    pair = Pair(Mlp, options={"budget": "1GiB"}, gradients={"accumulate": accumulate})
    order: dict[int, list[str]] = {}
    for optimizer in (pair.plain.optimizer, pair.optimizer):
        optimizer.register_step_post_hook(lambda o, *_: order.setdefault(id(o), []).append("own"))
    pair.train(3)
    pair.assert_same()
    assert set(heard) == {id(pair.plain.optimizer), id(pair.optimizer)}  # of nothing that was tried
    mine, plain = heard[id(pair.optimizer)], heard[id(pair.plain.optimizer)]
    assert len(mine) == len(plain) == 3
    assert all(same_bits(a, b) for one, other in zip(mine, plain, strict=True) for a, b in zip(one, other, strict=True))
    assert order[id(pair.optimizer)] == order[id(pair.plain.optimizer)] == ["own"] * 3


@pytest.mark.long
def test_a_hook_may_change_the_weights() -> None:
    def clamp(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        with torch.no_grad():
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.clamp_(-0.05, 0.05)

    pair = Pair(Mlp, options={"policy": "vdnn-all", "budget": "1GiB"})
    for optimizer in (pair.plain.optimizer, pair.optimizer):
        optimizer.register_step_post_hook(clamp)
    pair.train(3)
    pair.assert_same()


def test_hooks_that_would_find_more_than_fits_are_refused_before_the_step() -> None:
    pair = Pair(Mlp)
    pair.train()
    handle = pair.optimizer.register_step_post_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match=r"post-hooks .*budget"):
        pair.step(*pair.inputs)
    assert not pair.step.is_unfinished
    handle.remove()
    pair.train()
    pair.assert_same()


def test_hooks_before_the_step_of_all_optimizers_are_refused() -> None:
    pair = Pair(Mlp)
    handle = register_optimizer_step_pre_hook(lambda *_: None)
    try:
        with pytest.raises(UnsupportedError, match=r"pre-hooks.*clip_norm"):
            pair.step(*pair.inputs)
    finally:
        handle.remove()
    pair.train()
    pair.assert_same()


# -- averages and copies


@pytest.mark.long
def test_averages_of_the_model_are_those_of_plain_training() -> None:
    pair = Pair(Mlp, options={"budget": 0.6})
    models = pair.plain.model, pair.model
    averages = [torch.optim.swa_utils.AveragedModel(m, use_buffers=True) for m in models]
    own = [copy.deepcopy(m) for m in models]
    for _ in range(3):
        pair.train()
        for model, average, mine in zip(models, averages, own, strict=True):
            average.update_parameters(model)
            with torch.no_grad():
                for kept, parameter in zip(mine.parameters(), model.parameters(), strict=True):
                    kept.lerp_(parameter, 0.1)
    for one, other in (averages, own):
        assert not any(isinstance(m._parameters, Guarded) for m in other.modules())
        assert all(map(same_bits, one.state_dict().values(), other.state_dict().values()))
    pair.train()
    pair.assert_same()


@pytest.mark.long
def test_a_copy_of_the_model_is_trained_by_a_step_of_its_own() -> None:
    pair = Pair(Mlp, OPTIMIZERS["momentum"], options={"budget": 0.6})
    pair.train(2)
    other = Pair(Mlp, OPTIMIZERS["momentum"], options={"budget": 0.6})
    other.step.close()
    other.plain = Plain(copy.deepcopy(pair.plain.model), None)
    other.model = copy.deepcopy(pair.model)
    other.plain.optimizer = OPTIMIZERS["momentum"](other.plain.model.parameters())
    other.optimizer = OPTIMIZERS["momentum"](other.model.parameters())
    other.make_step()
    other.train(2)
    other.assert_same()
    pair.train(2)
    pair.assert_same()


def test_a_step_itself_is_not_copied_or_pickled() -> None:
    pair = Pair(Mlp)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(RequestError, match=r"not copied.*train_step"):
            attempt(pair.step)


@pytest.mark.short("overspill")
@pytest.mark.parametrize(
    "compiled_by", [torch.compile, lambda model: overspill.compile(model, budget="1GiB")], ids=["torch", "overspill"]
)
def test_a_compiled_model_is_trained_as_the_model_inside(compiled_by: Callable[[Any], Any]) -> None:
    pair = Pair(Mlp, options={"budget": 0.6})
    pair.step.close()
    inside, pair.model = pair.model, compiled_by(pair.model)
    pair.make_step()
    pair.model = inside
    pair.train(2)
    pair.assert_same()


# -- what a loss function returns besides its loss


class Named(NamedTuple):
    loss: Tensor
    accuracy: Tensor


@dataclass
class Output:
    logits: Tensor
    loss: Tensor
    nothing: None = None


def parts(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = model(x)
    return F.cross_entropy(logits, y), logits, logits.argmax(1).eq(y).float().mean()


def as_tuple(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss, logits, accuracy = parts(model, x, y)
    return loss, {"logits": logits, "more": [accuracy, None]}


def as_named_tuple(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss, _, accuracy = parts(model, x, y)
    return Named(loss, accuracy)


def as_dictionary(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss, logits, accuracy = parts(model, x, y)
    return {"accuracy": accuracy, "loss": loss, "logits": logits.t()}


def as_dataclass(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    loss, logits, _ = parts(model, x, y)
    return Output(logits, loss)


def with_what_changes(model: Any, x: Tensor, y: Tensor) -> Any:
    """Weights, buffers and inputs as they were before the update."""
    loss, logits, _ = parts(model, x, y)
    return loss, model.last.weight, model.norm.running_mean, x, logits, logits, 2 * loss


def loss_in(returned: Any) -> Tensor:
    if isinstance(returned, dict):
        return returned["loss"]
    return returned.loss if isinstance(returned, Output) else returned[0]


def tensors_of(returned: Any) -> list[Tensor]:
    if isinstance(returned, Output):
        returned = vars(returned)
    return [t for t in tree_leaves(returned) if isinstance(t, Tensor)]


RETURNS = [as_tuple, as_named_tuple, as_dictionary, as_dataclass, with_what_changes]


@pytest.mark.short("with_what_changes", "as_dictionary")
@pytest.mark.parametrize("loss_fn", RETURNS)
def test_what_a_loss_function_returns_is_returned_without_gradients(loss_fn: Any) -> None:
    pair = Pair(Mlp)
    pair.step.close()
    pair.step = step = overspill.train_step(
        pair.model, loss_fn, pair.optimizer, budget=0.8, policy="window", store="host"
    )
    kept = []
    for seed in range(3):
        torch.manual_seed(seed)
        pair.plain.optimizer.zero_grad()
        expected = loss_fn(pair.plain.model, *pair.inputs)
        before = [t.detach().clone() for t in tensors_of(expected)]
        loss_in(expected).backward()
        pair.plain.optimizer.step()
        torch.manual_seed(seed)
        found = step(*pair.inputs)
        assert type(found) is type(expected)
        assert not any(t.requires_grad for t in tensors_of(found))
        assert list(map(torch.Tensor.stride, tensors_of(found))) == list(map(torch.Tensor.stride, before))
        kept.append((tensors_of(found), before))
    pair.assert_same()
    for mine, plain in kept:  # and no later step has changed them
        assert len(mine) == len(plain)
        assert all(map(same_bits, mine, plain))


def test_what_is_returned_is_within_the_budget_even_if_the_last_steps_is_still_held() -> None:
    def with_logits(model: nn.Module, x: Tensor, y: Tensor) -> Any:
        logits = model(x)
        return F.cross_entropy(logits, y), logits.repeat(1, 500)

    model = made()
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    step = overspill.train_step(model, with_logits, optimizer, budget=0.9, store="host")
    loss, held = step(*batch_for(model))
    step.tracker = LiveBytes(torch.device("cpu"))
    step.tracker.add([held, loss])
    for _ in range(2):
        loss, held = step(*batch_for(model))
    (plan,) = step.plans
    assert held.nbytes < step.tracker.peak_bytes <= plan.peak_bytes <= plan.budget_bytes


RETURNS_REFUSED: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "a number": (lambda *args: (parts(*args)[0], {"epoch": 3}), {}, r"\['epoch'\], a int"),
    "no loss": (lambda *args: {"total": parts(*args)[0]}, {}, "without 'loss'"),
    "loss not first": (lambda *args: ({"a": 1}, parts(*args)[0]), {}, "is dict|besides"),
    "micro-batches": (as_tuple, {"accumulate": 2}, "2 tensors .*accumulate=1"),
}


@pytest.mark.parametrize(("loss_fn", "options", "message"), RETURNS_REFUSED.values(), ids=RETURNS_REFUSED)
def test_what_cannot_be_returned_is_refused_in_one_line(
    loss_fn: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    model = made()
    step = overspill.train_step(model, loss_fn, OPTIMIZERS["sgd"](model.parameters()), **options)
    with pytest.raises(OverspillError, match=message) as refusal:
        step(*batch_for(model))
    assert "\n" not in str(refusal.value)
    assert not step.is_unfinished


# -- hooks of modules


def test_backward_hooks_of_modules_that_change_gradients_are_part_of_the_step() -> None:
    def hooked() -> nn.Module:
        model = Mlp()
        model.last.register_full_backward_hook(lambda _m, grads, _o: (2 * grads[0],))
        model.middle.register_full_backward_pre_hook(lambda _m, grads: (3 * grads[0],))
        model.first.register_forward_pre_hook(lambda _m, args: (0.5 * args[0],))
        return model

    pair = Pair(hooked)
    pair.train(3)
    pair.assert_same()
