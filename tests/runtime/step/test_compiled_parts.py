"""Blocks and functions that the user has compiled are traced through: the bits of plain eager, and they stay compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import overspill

FACTOR = 1.0
calls: list[int] = []


def counted(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
    """A backend that notes each call of what it has compiled."""
    return lambda *given: calls.append(1) or module(*given)


def scaled(x: Tensor) -> Tensor:
    return x.sin() * FACTOR


compiled = torch.compile(scaled, backend=counted, fullgraph=True)
without_gradient = torch.no_grad()(scaled)


class Block(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor] = scaled) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return x + self.function(self.linear(x)) * x.mean()


def in_place(model: nn.Sequential) -> None:
    model[0].compile(backend=counted, fullgraph=True)


def wrapped(model: nn.Sequential) -> None:
    model[0] = torch.compile(model[0], backend=counted, fullgraph=True)


def forward(model: nn.Sequential) -> None:
    model[0].forward = torch.compile(model[0].forward, backend=counted)


def function(model: nn.Sequential) -> None:
    model[0].function = compiled


WAYS = (in_place, wrapped, forward, function, lambda model: model.compile(backend=counted))


@pytest.fixture(autouse=True)
def _reset(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(globals(), "FACTOR", 1.0)
    yield
    torch._dynamo.reset()


def trained(compile_part: Callable[[Any], None], planned: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Three losses, and the model; before the last step a global changes that the blocks read."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(without_gradient))
    compile_part(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = overspill.train_step(model, squares, optimizer, budget="1MiB", store="host") if planned else None
    losses = []
    for factor in (1.0, 1.0, 3.0):
        monkeypatch.setitem(globals(), "FACTOR", factor)
        if step is not None:
            losses.append(step(torch.ones(2, 8)).item())
            continue
        optimizer.zero_grad()
        loss = squares(model, torch.ones(2, 8))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if step is not None:
        step.close()
    return losses, model


def squares(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("way", WAYS)
def test_what_is_compiled_inside_trains_as_plain_and_stays_compiled(
    way: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    losses, model = trained(way, True, monkeypatch)
    assert not calls
    assert losses == trained(lambda _: None, False, monkeypatch)[0]
    model(torch.ones(2, 8))
    assert calls
    calls.clear()


def test_branches_that_torch_cond_compiles_itself_train_as_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def branches(model: nn.Sequential) -> None:
        model[0].function = lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))

    assert trained(branches, True, monkeypatch)[0] == trained(branches, False, monkeypatch)[0]
