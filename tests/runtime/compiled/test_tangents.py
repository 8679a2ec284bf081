"""What autograd gives a compiled model's backward: nothing for some outputs, or gradients in another order in memory."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import overspill
from overspill.core.errors import InfeasibleBudgetError
from overspill.runtime.compiled.tangents import takes_what_is_saved, without_absent


class TwoHeads(nn.Module):
    """Of which a loss may leave one out; a graph break makes two graphs of it if asked for."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        self.breaks = breaks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.tanh(self.body(x))
        second = self.second(x)
        if self.breaks:
            torch._dynamo.graph_break()
        return self.first(x), second


def trained(model: nn.Module, call: Any) -> list[Tensor | None]:
    """Weights after some steps of AdamW, of which every other leaves the second head out, and the last gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    for step in range(4):
        first, second = call(torch.randn(16, 8, generator=torch.Generator().manual_seed(step)))
        (first.square().mean() + (second.sin().mean() if step % 2 == 0 else 0)).backward()
        if step < 3:
            optimizer.step()
            optimizer.zero_grad()
    return [*model.parameters(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("breaks", [False, True])
def test_what_no_loss_follows_from_has_no_gradient_as_in_plain_pytorch(breaks: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, ours = TwoHeads(breaks=breaks), TwoHeads(breaks=breaks)
    ours.load_state_dict(plain.state_dict())
    for a, b in zip(trained(plain, plain), trained(ours, overspill.compile(ours, budget="1GiB")), strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.equal(a, b)


class SineAndCosine(torch.autograd.Function):
    """Whose backward gets zeros for what has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, sine: Tensor, cosine: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return sine * x.cos() - cosine * x.sin()


PARTS = {
    "halves": lambda x: x.chunk(2, -1),
    "vectors and values": lambda x: torch.linalg.qr(x @ x.mT + torch.eye(8)),
    "a Function": SineAndCosine.apply,
}


class Parts(nn.Module):
    """A recurrent layer, and what one op makes several parts of."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.layer, self.parts = nn.LSTM(8, 8, batch_first=True), parts

    def forward(self, x: Tensor) -> Any:
        made, state = self.layer(x)
        return *self.parts(made), *state


@pytest.mark.short("halves-0")
@pytest.mark.parametrize(("name", "read"), by_turns(PARTS, [0, 1, 2]))
def test_of_several_results_of_one_op_a_loss_may_read_one(name: str, read: int) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Parts(PARTS[name]), torch.randn(4, 8, 8)
    found = []
    for call in (model, overspill.compile(model, budget="1GiB")):
        call(x)[read].square().mean().backward()
        found.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


class Fakes(TorchDispatchMode):
    """Counts results that are fake."""

    found = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.found += any(isinstance(one, FakeTensor) for one in tree_leaves(made))
        return made


def test_modes_around_a_backward_that_is_traced_again_do_not_see_the_trace() -> None:
    torch._dynamo.reset()
    model = TwoHeads(breaks=False)
    first, _ = overspill.compile(model, budget="1GiB")(torch.randn(16, 8))
    with Fakes() as fakes:
        first.square().mean().backward()
    assert fakes.found == 0
    assert model.second.weight.grad is None


class Pixels(nn.Module):
    """A word for each pixel, and outside of its graph what is made of that."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


class Words(Pixels):
    """The same by matrix products, which copy a gradient that they cannot take as it is; returns what nobody reads as well."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x.movedim(1, -1)).movedim(-1, 1))


class Unread(Pixels):
    """Returns its input to what is read as well, which nobody reads."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.layer(x)
        return F.interpolate(z, scale_factor=2, mode="bilinear"), z  # type: ignore[return-value]


LOSSES = {
    "as it is in eager": lambda z: F.interpolate(z, scale_factor=4, mode="bilinear").sin().mean(),
    "transposed": lambda z: z.transpose(1, 2).contiguous().sin().mean(),
    "expanded": lambda z: z.mean(),
    "of some": lambda z: z[:, ::2].sin().mean(),
}


CASES = [(Pixels, name) for name in LOSSES] + [(Words, "transposed"), (Words, "of some"), (Unread, "as it is in eager")]


@pytest.mark.short("case0-how0", "case10-how10", "case26-how26")
@pytest.mark.parametrize(
    ("case", "how"), by_turns(CASES, product([torch.contiguous_format, torch.channels_last], [False, True]))
)
def test_a_gradient_in_another_order_in_memory_is_read_as_in_plain_pytorch(
    case: tuple[type[Pixels], str], how: tuple[torch.memory_format, bool]
) -> None:
    (model, name), (layout, autocast) = case, how
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, ours = model(), model()
    ours.load_state_dict(plain.state_dict())
    compiled = overspill.compile(ours, budget="1GiB")
    for seed in range(2):
        x = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(seed)).to(memory_format=layout)
        for call in (plain, compiled):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                made = call(x)
                loss = LOSSES[name](made[0] if isinstance(made, tuple) else made)
            loss.backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad) if a.grad is not None else b.grad is None


class Waves(nn.Module):
    """Returns what goes on in another order in memory, which nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.wave = nn.Linear(8, 8), nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        words = self.layer(x)
        return self.wave(words.transpose(1, 2)).sin().mean(), words


def test_a_gradient_that_nothing_is_added_to_is_in_its_own_order() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, ours = Waves(), Waves()
    ours.load_state_dict(plain.state_dict())
    compiled = overspill.compile(ours, budget="1GiB")
    x = torch.randn(3, 9, 8)
    for call in (plain, compiled):
        call(x)[0].backward()
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_what_follows_from_a_sum_that_is_left_out_is_a_view_of_the_other_summand() -> None:
    def backward(tangents_1: Tensor, tangents_2: Tensor) -> tuple[Tensor, Tensor]:
        both = (tangents_1 + tangents_2.t()).view(2, 2, 4)
        return both, both * 2

    joint = make_fx(backward, tracing_mode="fake")(torch.randn(4, 4), torch.randn(4, 4))
    without_absent(joint, [0])
    nodes = {node.name: node.meta.get("val") for node in joint.graph.nodes}
    assert nodes["view"].untyped_storage() == nodes["tangents_2_1"].untyped_storage()
    assert nodes["view"].stride() == nodes["mul"].stride() == (2, 1, 4)


def saves(*order: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """A forward that saves its sine and cosine in this order, and a backward that takes them so."""
    aten, forward, backward = torch.ops.aten, fx.Graph(), fx.Graph()
    x = forward.placeholder("x")
    made = {name: forward.call_function(getattr(aten, name).default, (x,)) for name in ("sin", "cos")}
    forward.output((x, *(made[name] for name in order)))
    taken = {name: backward.placeholder(name) for name in order}
    tangent = backward.placeholder("tangents_1")
    scaled = backward.call_function(aten.mul.Tensor, (taken["sin"], tangent))
    backward.output((backward.call_function(aten.sub.Tensor, (scaled, taken["cos"])) if "cos" in taken else scaled,))
    return fx.GraphModule(nn.Module(), forward), fx.GraphModule(nn.Module(), backward)


@pytest.mark.parametrize("order", [("sin", "cos"), ("cos", "sin"), ("sin",)])
def test_a_backward_that_is_traced_again_takes_what_forward_saves(order: tuple[str, ...]) -> None:
    forward, _ = saves("sin", "cos")
    again, backward = saves(*order)
    if "cos" not in order:  # it is still computed, and another backward may need more than is saved
        assert not takes_what_is_saved(saves("sin", "cos")[1], forward, again, 1)
    assert takes_what_is_saved(backward, again, forward, 1)
    assert backward(torch.tensor(2.0), torch.tensor(3.0), torch.tensor(5.0))[0] == (7 if "cos" in order else 10)


class WithLoss(nn.Module):
    """Returns its loss, and the logits that it made that from."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(50, 32), nn.Linear(32, 64), nn.Linear(64, 500)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.body(self.embed(x)).relu())
        return F.cross_entropy(logits, labels), logits


BESIDE = {
    "its own": lambda loss, logits, step: loss,
    "its own and one more": lambda loss, logits, step: loss + logits.square().mean(),
    "another": lambda loss, logits, step: logits.std(),
    "one more at times": lambda loss, logits, step: loss + (logits.std() if step == 2 else 0),
}


def with_loss(model: nn.Module, call: Any, of: Any) -> Iterator[list[Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    for step in range(4):
        loss = of(*call(*torch.randint(50, (2, 128), generator=torch.Generator().manual_seed(step))), step)
        loss.backward()
        yield [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()


def peaks_within(budget: str, placement: str | None, of: str) -> Iterator[int]:
    """The planned peak after each step of a model that returns its loss, whose gradients are plain PyTorch's."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain, ours = WithLoss(), WithLoss()
    ours.load_state_dict(plain.state_dict())
    session = overspill.Session(budget=budget, placement=placement)
    steps = with_loss(ours, overspill.compile(ours, session=session), BESIDE[of])
    for a, b in zip(with_loss(plain, plain, BESIDE[of]), steps, strict=True):
        assert all(torch.equal(*pair) for pair in zip(a, b, strict=True))
        yield session.peak_bytes


@pytest.mark.short("its own-None", "another-None")
@pytest.mark.filterwarnings("ignore:this step")
@pytest.mark.parametrize(("of", "placement"), by_turns(BESIDE, [None, "planned"]))
def test_room_for_another_loss_is_there_where_one_is_made(of: str, placement: str | None) -> None:
    peaks = list(peaks_within("smallest", placement, of))
    assert (peaks[1] < 0.9 * peaks[0]) == (of in ("its own", "one more at times"))
    assert (peaks[3] < 0.9 * peaks[0]) == (of == "its own")


@pytest.mark.long
def test_a_model_that_returns_its_loss_trains_where_no_other_has_room() -> None:
    assert max(peaks_within("1.1MiB", None, "its own")) < 1.1 * 2**20
    peaks = peaks_within("1.1MiB", None, "its own and one more")
    with pytest.warns(UserWarning, match="budget"):
        next(peaks)
    with pytest.raises(InfeasibleBudgetError):
        next(peaks)
