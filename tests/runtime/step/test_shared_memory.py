"""Weights whose memory others hold: other tensors, NumPy, other processes, other weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.runtime.step.whole_steps import Mlp, Pair, cross_entropy, planned_peak
from tests.turns import rest_long
from torch import nn

import overspill
from overspill.core.errors import RequestError, UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step.away import Away
from overspill.runtime.step.residency import bring_for_others

Change = Callable[[Any], Any]


def weight(model: Any) -> nn.Parameter:
    found: nn.Parameter = model.middle[1].weight
    return found


def both(pair: Pair, change: Change) -> list[Any]:
    return [change(model) for model in (pair.plain.model, pair.model)]


def is_away(pair: Pair) -> bool:
    return pair.step._state.residency["model.middle.1.weight"].away


def over(model: Any, memory: Any) -> Any:
    weight(model).data = memory[-32:]
    return memory


HOLDERS: dict[str, Change] = {
    "an array": lambda m: weight(m).detach().numpy(),
    "NumPy's memory": lambda m: over(m, torch.from_numpy(weight(m).detach().numpy().copy())).numpy(),
    "other processes": lambda m: weight(m).share_memory_().shape,
    "DLPack": lambda m: torch.utils.dlpack.to_dlpack(weight(m).detach()),
    "a graph of autograd": lambda m: m.middle[1](torch.ones(2, 32, requires_grad=True)),
    "a row": lambda m: weight(m).data[3],
    "a larger tensor": lambda m: over(m, weight(m).detach().repeat(2, 1)),
}


@pytest.mark.short("DLPack", "a graph of autograd")
@pytest.mark.parametrize("name", rest_long(HOLDERS, ["DLPack", "a larger tensor", "a graph of autograd"]))
def test_a_weight_that_others_hold_stays_where_it_is_and_counts(name: str) -> None:
    pair = Pair(Mlp)
    pair.train()
    held = both(pair, HOLDERS[name])
    at = weight(pair.model).data_ptr()
    with pytest.warns(UserWarning, match=r"middle\.1\.weight"):
        pair.train(2)
    assert weight(pair.model).data_ptr() == at
    users = 4096 if name == "a larger tensor" else 0  # the half that is not the weight's
    assert pair.measured_peak() <= planned_peak(pair.step) + users
    pair.assert_same()
    if name in ("an array", "a larger tensor", "a row"):
        assert same_bits(*map(torch.as_tensor, held))
    if name in ("DLPack", "a row"):
        del held
        pair.train(2)
        assert is_away(pair)


def test_a_weight_in_the_arena_that_others_hold_is_refused_until_they_drop_it() -> None:
    pair = Pair(Mlp, options={"placement": "planned", "budget": 1.0})
    pair.train()
    held = weight(pair.model).detach()
    with pytest.raises(RequestError, match=r"middle\.1\.weight"):
        pair.step(*pair.inputs)
    del held
    pair.train()
    pair.assert_same()


def tied(model: Any) -> None:
    model.middle[0].weight.data = weight(model).data


def partly(model: Any) -> None:
    memory = torch.cat([weight(model).data, model.middle[0].weight.data])
    weight(model).data, model.middle[0].weight.data = memory[:32], memory[16:48]


def mapped(model: Any) -> None:
    path = Path.cwd() / "weights.safetensors"
    save_file(dict(model.named_parameters()), path)
    for name, value in load_file(path).items():
        model.get_parameter(name).data = value


SHARED: dict[str, tuple[Change, bool]] = {
    "detached tensors": (lambda m: [p.detach() for p in m.parameters()], True),
    "another model's parameter": (lambda m: [nn.Parameter(weight(m).data)], True),
    "a file that is mapped": (mapped, True),
    "a vector of which weights are views": (
        lambda m: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(m.parameters()), m.parameters()), True,
    ),
    "another weight": (tied, False),
    "a part of another weight": (partly, False),
    "a buffer": (lambda m: m.register_buffer("row", weight(m).data[0]), False),
}  # fmt: skip


@pytest.mark.short("another weight")
@pytest.mark.parametrize(
    "name", rest_long(SHARED, ["a file that is mapped", "another weight", "a part of another weight"])
)
def test_what_shares_memory_with_a_weight_is_as_in_plain_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    change, moves = SHARED[name]
    pair = Pair(Mlp)
    pair.train()
    peak = pair.measured_peak()
    plain, ours = both(pair, change)
    pair.train(2)
    assert pair.measured_peak() == peak if moves else pair.measured_peak() <= planned_peak(pair.step)
    assert ("model.middle.1.weight" in pair.step._state.residency and is_away(pair)) == moves
    if plain is not None:
        for aliases in (plain, ours):
            aliases[0].data.zero_()
        pair.train()
        assert all(map(same_bits, copy.deepcopy(ours), plain))
    both(pair, lambda m: setattr(weight(m), "data", weight(m).data.clone()))
    pair.train(2)
    assert is_away(pair)
    pair.assert_same()


def test_a_tensor_that_has_the_id_of_one_that_is_gone_is_not_taken_for_it() -> None:
    pair = Pair(Mlp)
    pair.train()
    alias = weight(pair.model).detach()
    pair.train(2)
    assert is_away(pair)
    assert isinstance(alias, Away)
    freed, others = id(alias), []
    del alias
    while id(other := torch.ones(1)) != freed:
        others.append(other)
        assert len(others) < 10_000
    pair.step._state.gate.alone(lambda: bring_for_others([other]))  # as a step does with tensors that its graph reads


@pytest.mark.parametrize("backwards", [False, True])
def test_two_weights_over_one_memory_need_updates_one_by_one(*, backwards: bool) -> None:
    model = Mlp()
    tied(model)
    optimizer = torch.optim.AdamW([*model.parameters()][:: -1 if backwards else 1], foreach=not backwards)
    with pytest.raises(UnsupportedError, match="make one parameter"):
        overspill.train_step(model, cross_entropy, optimizer)


def test_references_read_weights_and_move_them_only_for_their_values() -> None:
    pair = Pair(Mlp)
    averages = both(pair, lambda m: [(ref(p), p.detach().clone()) for p in m.parameters()])
    graphs = both(pair, lambda m: m.norm(torch.ones(2, 32)).sum())
    held = weight(pair.model)
    for _ in range(3):
        pair.train()
        assert (held.shape, held.numel(), held.requires_grad, held.grad, len(held)) == ((32, 32), 1024, True, None, 32)
        assert isinstance(held, nn.Parameter)
        assert is_away(pair)
        for average in averages:
            for weak, shadow in average:
                shadow.lerp_(weak(), 0.5)
        assert not is_away(pair)
    assert all(same_bits(a, b) for (_, a), (_, b) in zip(*averages, strict=True))
    for graph in graphs:
        with pytest.raises(RuntimeError, match="inplace"):
            graph.backward()
    pair.assert_same()


def test_an_input_over_a_weight_is_refused() -> None:
    pair = Pair(Mlp)
    with pytest.raises(UnsupportedError, match=r"input 0 .*clone\(\)"):
        pair.step(pair.model.first.weight.detach()[:8, :12], pair.inputs[1])


class Listed(torch.optim.Optimizer):
    """Momentum that is kept in a list."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                (momentum,) = self.state[p].setdefault("momenta", [torch.zeros_like(p)])
                p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=self.param_groups[0]["lr"])


@pytest.mark.long
def test_state_in_a_list_is_read_by_references_too() -> None:
    pair = Pair(Mlp, Listed)
    pair.train()
    plain, ours = ([of["momenta"][0] for of in o.state.values()] for o in (pair.plain.optimizer, pair.optimizer))
    pair.train()
    assert any("momenta" in name for name in pair.step._state.residency.away())
    assert all(map(same_bits, ours, plain))
