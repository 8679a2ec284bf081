"""Frozen weights of tensor subclasses, as quantised ones are, move in a loop with the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import overspill
from overspill.errors import InfeasibleBudgetError, UnsupportedError

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]
WIDTH, LAYERS = 64, 8
aten = torch.ops.aten


def quantised(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the values of `weight` in 8 bits, and a scale for each eight of them."""
    blocks = weight.reshape(-1, 8)
    scales = blocks.abs().amax(1) / 127
    return (blocks / scales[:, None]).round().to(torch.int8).reshape(weight.shape), scales


def restored(values: Tensor, scales: Tensor) -> Tensor:
    return (values.reshape(-1, 8) * scales[:, None]).reshape(values.shape)


class State:
    """What a weight needs besides its values, as bitsandbytes' QuantState."""

    def __init__(self, scales: Tensor) -> None:
        self.scales = scales


class Packed(nn.Parameter):
    """A weight that has its values itself, and the rest in an attribute, as bitsandbytes' Params4bit."""

    state: State

    def __new__(cls, values: Tensor, state: State) -> Self:
        made: Self = Tensor._make_subclass(cls, values, False)
        made.state = state
        return made

    def __deepcopy__(self, memo: Any) -> Packed:
        return Packed(self.data.clone(), State(self.state.scales.clone()))

    def values(self) -> Tensor:
        return restored(self, self.state.scales)


class Wrapped(Tensor):
    """A weight that wraps two tensors, as those of torchao and Quanto."""

    inner: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, scales: Tensor) -> Self:
        made: Self = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=scales.dtype, device=inner.device)
        made.inner, made.scales = inner, scales
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner", "scales"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], *_: Any) -> Wrapped:
        return Wrapped(parts["inner"], parts["scales"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        of = args[0]
        if func in (aten.detach.default, aten.clone.default):
            return Wrapped(func(of.inner), func(of.scales))
        args = [restored(arg.inner, arg.scales) if isinstance(arg, Wrapped) else arg for arg in args]
        return func(*args, **(kwargs or {}))

    def values(self) -> Tensor:
        if type(self) is not Wrapped:
            raise TypeError
        return restored(self.inner, self.scales)


def packed(weight: Tensor) -> nn.Parameter:
    values, scales = quantised(weight)
    return Packed(values, State(scales))


def wrapped(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(Wrapped(*quantised(weight)), requires_grad=False)


class Layer(nn.Module):
    """A frozen quantised layer with an adapter."""

    def __init__(self, make: Callable[[Tensor], nn.Parameter]) -> None:
        super().__init__()
        self.weight: Any = make(nn.Linear(WIDTH, WIDTH).weight.data)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(functional.linear(x, self.weight.values()) + self.up(self.down(x)))


def states_of(model: nn.Module) -> list[Any]:
    """Return copies of what a state dict has, quantised weights by their bytes."""
    return [v.values().clone() if isinstance(v, Wrapped) else v.clone() for v in model.state_dict().values()]


def stepped(model: Any, optimizer: torch.optim.Optimizer) -> Tensor:
    """The loss of one step of a loop."""
    loss = model(torch.randn(4, WIDTH)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.short("packed")
@pytest.mark.parametrize("make", [packed, wrapped])
def test_a_loop_has_the_bits_of_plain_pytorch_with_quantised_weights_away(
    make: Callable[[Tensor], nn.Parameter],
) -> None:
    def away(session: Any) -> int:
        """Return how many bytes of quantised weights the store has; the rest of them is on the device."""
        session.loop.begin()  # as at each call, to which all of it must not come
        residents = session.loop.state.residency.residents.values()
        return sum(r.spec.nbytes for r in residents if r.away and ".weight" in r.name and "down" not in r.name)

    def run(budget: str | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(make) for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        compiled = model if budget is None else overspill.compile(model, budget=budget, store="host")
        seen: list[Any] = []
        for i in range(5):
            seen.append(stepped(compiled, optimizer))
            assert budget is None or away(compiled.overspill) > 0.5 * LAYERS * WIDTH * WIDTH
            if i == 0:  # which the store serves
                seen += states_of(model)
                assert budget is None or away(compiled.overspill) > 0.5 * LAYERS * WIDTH * WIDTH
            elif i == 1:
                with torch.no_grad():
                    seen.append(compiled(torch.ones(2, WIDTH)))
                seen.append(model[2].weight.values().clone())
            elif i == 2:
                seen += states_of(copy.deepcopy(model))
            elif i == 3:
                model[1].weight = make(torch.ones(WIDTH, WIDTH))
        return seen + states_of(model)

    plain, ours = run(None), run("75KiB")
    assert all(torch.equal(one, other) for one, other in zip(plain, ours, strict=True))


class Repacked(Layer):
    """A layer that packs its weight otherwise when it is evaluated, as bitsandbytes' Linear4bit on some CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            self.weight.data = self.weight.data.t().contiguous()
        return super().forward(x)


@pytest.mark.long
def test_a_weight_that_forward_gives_other_memory_is_refused_and_training_goes_on() -> None:
    def run(*, evaluates: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Repacked(packed) for _ in range(3)))
        compiled = overspill.compile(model, budget="75KiB", store="host")
        losses = []
        for i in range(3):
            if i == 1 and evaluates:
                with torch.no_grad(), pytest.raises(UnsupportedError, match="other memory"):
                    compiled.eval()(torch.ones(4, WIDTH))
                compiled.train()
            losses.append(compiled(torch.randn(4, WIDTH)).square().mean())
            losses[-1].backward()
        return losses

    assert all(map(torch.equal, run(evaluates=True), run(evaluates=False)))


@pytest.mark.long
def test_a_weight_with_a_second_tensor_on_its_memory_stays_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "build/definitions/loops")
    of_8_bits = pytest.importorskip("bitsandbytes").nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = of_8_bits.Linear8bitLt(128, 128, bias=False, has_fp16_weights=False)
            self.down, self.up = nn.Linear(128, 2, bias=False), nn.Linear(2, 128, bias=False)
            self.frozen.weight = of_8_bits.Int8Params(torch.randn(128, 128), False, has_fp16_weights=False)
            self.frozen.to("cpu")  # which quantises it

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.frozen(x) + self.up(self.down(x)))

    def run(budget: str | int | None) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        compiled = model if budget is None else overspill.compile(model, budget=budget, store="host")
        losses = []
        for i in range(3):
            loss = compiled(torch.randn(4, 128, generator=torch.Generator().manual_seed(i))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    with pytest.raises(InfeasibleBudgetError):
        run("50%")
    assert all(map(torch.equal, run(None), run("90%")))


@pytest.mark.long
def test_quantised_weights_that_get_gradients_stay_on_the_device_by_name() -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(Wrapped(*quantised(nn.Linear(WIDTH, WIDTH).weight.data)))
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return functional.relu(functional.linear(x, self.weight) + self.up(self.down(x)))

    def run(budget: str | None) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Trained() for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW((p for n, p in model.named_parameters() if "weight" not in n.split(".")[1]), 1e-2)
        compiled = model if budget is None else overspill.compile(model, budget=budget, store="host")
        seen: list[Any] = []
        for _ in range(3):
            seen += [
                stepped(compiled, optimizer),
                *(p.detach().clone() for p in model.parameters() if not isinstance(p, Wrapped)),
            ]
        assert budget is None or "planned step needs plain" in compiled.overspill.loop.why_not
        return seen

    plain, ours = run(None), run("smallest")
    assert all(map(torch.equal, plain, ours))
