"""A step may ask for values that follow from its inputs, buffers and constants: it goes the way that plain PyTorch goes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.runtime.step.whole_steps import CPU, differences
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import overspill
from overspill.capture.compiled import guards
from overspill.core.errors import UnsupportedError
from overspill.runtime.reachable import same_bits
from overspill.runtime.step import plans
from overspill.runtime.tracker import LiveBytes

Loss = Callable[["Net", Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


class Net(nn.Module):
    """Two layers, dropout, and a buffer that counts calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.drop = nn.Linear(12, 16), nn.Linear(16, 12), nn.Dropout(0.25)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("level", torch.tensor([0.5]))
        self.limit = torch.tensor(2.0)  # neither parameter nor buffer

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(self.drop(self.first(x).relu()))


def batch(seed: int, *, full: bool = False, large: bool = False) -> Batch:
    drawn = torch.Generator().manual_seed(seed)
    x, mask = torch.randn((8, 12), generator=drawn), torch.rand((8,), generator=drawn) > 0.4
    mask[0] = not full and bool(mask[0])
    return x * (3 if large else 0.1), torch.ones_like(mask) if full else mask


class Sides:
    """A net trained by the plain loop, and a copy by a planned step."""

    def __init__(self, loss: Loss, **options: object) -> None:
        torch.manual_seed(0)
        self.loss, self.plain = loss, Net()
        self.managed = copy.deepcopy(self.plain)
        self.optimizers = [torch.optim.AdamW(net.parameters(), 1e-2) for net in (self.plain, self.managed)]
        self.accumulate = int(options.get("accumulate", 1))
        self.step = overspill.train_step(
            self.managed, loss, self.optimizers[1], **{"budget": "1GiB", "store": "host"} | options
        )
        self.step.tracker = LiveBytes(CPU)
        self.seed = 0

    def train(self, *inputs: Tensor) -> None:
        """One step of both, with the same random numbers, and the same bits."""
        self.seed += 1
        torch.manual_seed(self.seed)
        self.optimizers[0].zero_grad()
        total = torch.zeros(())
        for part in zip(*(i.chunk(self.accumulate) for i in inputs), strict=True):
            loss = self.loss(self.plain, *part)
            loss = loss if self.accumulate == 1 else loss / self.accumulate
            loss.backward()
            total = total + loss.detach()
        self.optimizers[0].step()
        after = torch.get_rng_state()
        torch.manual_seed(self.seed)
        assert same_bits(self.step(*inputs), total)
        assert torch.equal(torch.get_rng_state(), after)
        assert differences(self.plain, self.optimizers[0], self.managed, self.optimizers[1]) == []


def asks_all(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    return y.square().mean() if mask.all() else (y * mask[:, None]).abs().mean()


def asks_maximum(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x.clamp(-1, 1) if x.abs().max() > 2 else x).square().mean() + mask.sum()


def asks_number(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x).square().sum() / mask.sum().item()


def asks_one_element(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x).square().mean() if mask[:1] else net(x).abs().mean()


def asks_rows(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    rows = mask.nonzero()[:, 0]
    return net(x[rows]).square().mean() + rows.float().mean()


def asks_mask_of_activations(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x)[mask].square().mean() + net(x).masked_select(mask[:, None]).exp().mean()


def asks_two_masks(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    y[mask] = 0.5  # an assignment has the shape that it had
    return y[mask, :3].sum() + y[:, mask.repeat(2)[:12]].square().mean()


def asks_classes(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    kinds, places = torch.unique(mask.long().cumsum(0), return_inverse=True)
    return net(x)[:, : len(kinds)].square().mean() + places.float().mean()


def asks_repeats(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x).repeat_interleave(mask.long() + 1, 0).square().mean()


def asks_lengths(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    lengths = (mask.long() * 2 + 1).tolist()
    return torch.stack([row[:n].sum() for row, n in zip(net(x), lengths, strict=True)]).square().mean()


def asks_longest(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    spoken, lengths = net(x)[:, None].log_softmax(-1), mask.long().sum().clamp(max=3)[None]
    return torch.nn.functional.ctc_loss(spoken, torch.tensor([[1, 2, 3]]), torch.tensor([8]), lengths)


def asks_equality(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x).square().mean() if torch.equal(mask, torch.ones_like(mask)) else net(-x).square().mean()


def asks_buffer(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    late = bool(net.calls % 2) if mask.any() else False
    return net(x).square().mean() * (2 if late else 1) + (net.level > 0.1).all() * 0.5


def asks_constant(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    causal = torch.ones(4, 4).tril().bool()
    scale = 2.0 if causal.all() or net.limit > 1 else 1.0
    return net(x).square().mean() * scale + mask.sum() * 0


def asks_in_turn(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    kept = x[mask]
    kept = kept[kept[:, 0] > 0]
    return net(kept).square().sum() if len(kept) and kept.max() > 0.1 else net(x).square().sum()


def asks_self_loops(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    nodes = torch.arange(len(x))
    edges = torch.stack([nodes, (nodes + mask.long()) % len(x)])
    edges = edges[:, edges[0] != edges[1]]
    edges = torch.cat([edges, nodes.expand(2, -1)], 1)
    y = net(x)
    return torch.zeros_like(y).index_add(0, edges[1], y[edges[0]]).square().mean()


def asks_encoder(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    seen = torch.where(mask, 0.0, -1.0).expand(8, 8).tril()
    return net(ENCODER(net(x)[None], mask=seen)[0]).square().mean()


torch.manual_seed(0)
LAYER = nn.TransformerEncoderLayer(12, 2, 8, dropout=0.0, batch_first=True)
ENCODER = nn.TransformerEncoder(LAYER, 1, enable_nested_tensor=False).requires_grad_(False)
ASKED = {name.removeprefix("asks_"): loss for name, loss in list(globals().items()) if name.startswith("asks_")}
BATCHES = [batch(1, full=True), batch(2), batch(3, full=True), batch(2, large=True), batch(1, full=True), batch(2)]


ALIKE = {"maximum", "one_element", "rows", "two_masks", "repeats", "lengths", "equality", "encoder"}
"""What is asked as another of them does."""


@pytest.mark.short("mask_of_activations", "longest", "buffer", "constant")
@pytest.mark.parametrize("asked", [pytest.param(a, marks=pytest.mark.long) if a in ALIKE else a for a in ASKED])
def test_a_step_goes_the_way_that_its_values_lead_and_plans_each_way_once(asked: str) -> None:
    sides = Sides(ASKED[asked])
    for one in BATCHES:
        sides.train(*one)
    planned = len(sides.step.plans)
    for one in BATCHES[:2]:
        sides.train(*one)
    assert len(sides.step.plans) == planned <= 4
    assert sides.step.peak_bytes <= max(plan.peak_bytes for plan in sides.step.plans)


@pytest.mark.long
@pytest.mark.parametrize("asked", ["classes", "longest", "mask_of_activations", "rows", "two_masks"])
def test_shapes_that_follow_from_values_are_planned_with_inductor(asked: str) -> None:
    sides = Sides(ASKED[asked], backend="inductor", partition=1.0, budget="smallest")
    stock = torch.compile(sides.loss, dynamic=False)
    for seed, one in enumerate(BATCHES[:3]):
        torch.manual_seed(seed)
        sides.optimizers[0].zero_grad()
        loss = stock(sides.plain, *one)
        loss.backward()
        sides.optimizers[0].step()
        torch.manual_seed(seed)
        assert same_bits(sides.step(*one), loss.detach())
        assert differences(sides.plain, sides.optimizers[0], sides.managed, sides.optimizers[1]) == []
    assert len(sides.step.plans) == 2
    assert sides.step.peak_bytes <= max(plan.peak_bytes for plan in sides.step.plans)


def test_what_no_input_leads_to_is_not_asked_again() -> None:
    def loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        return net(x).square().mean() + (1.0 if torch.arange(4).sum() > 5 else 0.0) * mask.sum()

    sides = Sides(loss)
    with patch.object(guards, "_answers") as asked:
        sides.train(*BATCHES[0])
        sides.train(*BATCHES[1])
    asked.assert_not_called()
    assert len(sides.step.plans) == 1


def test_all_answers_come_from_a_device_in_one_transfer() -> None:
    values = [
        torch.tensor(True),
        torch.tensor(-0.0),
        (torch.tensor(2**53 + 1), torch.zeros(3, 2)),
        torch.tensor(1 + 2j),
        7,
    ]
    values.append(torch.tensor(1.5, dtype=torch.bfloat16))
    expected = [(1,), ("-0x0.0p+0",), (2**53 + 1, (3, 2)), (((1.0).hex(), (2.0).hex()),), (7,), ((1.5).hex(),)]
    assert guards._answers(values) == expected
    plain, transfers = Tensor.cpu, []

    def moved(self: Tensor) -> Tensor:
        transfers.append(self)
        return plain(self)

    not_on_cpu = patch.object(Tensor, "is_cpu", property(lambda _: False))
    with not_on_cpu, patch.object(Tensor, "cpu", moved):
        assert guards._answers(values) == expected
    assert len(transfers) == 1


@pytest.mark.long
@settings(max_examples=12, deadline=None, phases=[Phase.generate])
@given(data=st.data())
def test_no_batch_is_trained_by_a_stale_branch(data: st.DataObject) -> None:
    loss = data.draw(st.sampled_from([asks_all, asks_rows, asks_in_turn, asks_buffer, asks_self_loops]))
    drawn = st.tuples(st.integers(0, 3), st.booleans(), st.booleans())
    sides = Sides(
        loss, accumulate=data.draw(st.sampled_from([1, 2])), budget=data.draw(st.sampled_from(["1GiB", "smallest"]))
    )
    for seed, full, large in data.draw(st.lists(drawn, min_size=2, max_size=6)):
        sides.train(*batch(seed, full=full, large=large))


@pytest.mark.long
def test_micro_batches_may_have_other_answers_each() -> None:
    sides = Sides(asks_all, accumulate=2)
    half = torch.arange(8) < 4
    for mask in (half, ~half, torch.ones(8, dtype=torch.bool), half):
        sides.train(batch(1)[0], mask)


def test_the_peak_has_room_for_what_a_large_mask_is_asked() -> None:
    def loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
        pairs = mask[:, None] & mask[None, :]
        return net(x[:8]).square().mean() * (2 if (pairs.float() * 3).sum() > 4 else 1)

    sides = Sides(loss, budget="smallest")
    x, mask = torch.randn(8, 12), torch.arange(1000) > 3
    sides.optimizers[0].zero_grad()
    for _ in range(2):
        sides.step(x, mask)
    (plan,) = sides.step.plans
    assert plan.peak_bytes > 4 * 1000 * 1000
    assert sides.step.peak_bytes <= plan.peak_bytes


def test_the_inputs_of_a_step_are_not_kept() -> None:
    sides = Sides(asks_in_turn)
    x, mask = batch(2)
    sides.step(x, mask)
    held = weakref.ref(x), weakref.ref(mask)
    del x, mask
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_more_answers_than_plans_are_refused_with_the_line_that_asks() -> None:
    sides = Sides(lambda net, x, mask: net(x).square().mean() * x[0, 0].item() + mask.sum())
    message = r"line \d+\).* 3 .*torch\.where"
    with patch.object(plans, "MOST_ANSWERS", 3):
        for seed in range(3):
            sides.train(*batch(seed))
        with pytest.raises(UnsupportedError, match=message):
            sides.step(*batch(3))
    assert not sides.step.is_unfinished


def asks_activation(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    return y.sum() if (y > 0).any() else y.mean()


def asks_random(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    return net(x).sum() if torch.rand(()) > 0.5 else net(x).mean()


def asks_filled(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    """Of memory that was empty: without draws its values are not known, however the fake draw is made."""
    return net(x[int(torch.empty(1).uniform_(0.0, 3.0).item()) :]).sum()


def asks_experts(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    rows = (y.argmax(1) == 1).nonzero()[:, 0]
    return y.index_add(0, rows, net(x[rows])).mean()


@pytest.mark.parametrize(
    ("loss", "backend"),
    [
        (asks_activation, "eager"),
        *((loss, "inductor") for loss in (asks_activation, asks_experts)),
        (asks_random, "inductor"),
        (asks_filled, "inductor"),
    ],
)
def test_what_follows_from_parameters_or_chance_is_refused_with_its_line(loss: Loss, backend: str) -> None:
    FakeTensorMode.cache_clear()  # so that each op is made of its parts, as for the first time
    sides = Sides(loss, backend=backend)
    message = r"line \d+\).*torch\.where.*overspill\.compile"
    with pytest.raises(UnsupportedError, match=message) as raised:
        sides.step(*batch(1))
    assert "\n" not in str(raised.value)


def policy_loss(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    y = net(x)
    chosen = torch.distributions.Categorical(logits=y[:, :6], validate_args=True)
    around = torch.distributions.Normal(y[:, 6], y[:, 7].exp(), validate_args=True)
    if not (y[:, 8].abs() < 1e6).all():
        raise OverflowError("diverged")
    return -chosen.log_prob(mask.long()).mean() - around.log_prob(x[:, 0]).mean()


def assert_it_raises_its_own_errors(sides: Sides) -> None:
    """A step of `policy_loss` on parameters that its checks refuse; they are as before afterwards."""
    for name, value, error in (("logits", float("nan"), ValueError), ("diverged", 1e9, OverflowError)):
        before = copy.deepcopy(sides.managed.state_dict())
        with torch.no_grad():
            sides.managed.last.bias[8 if name == "diverged" else 0] = value
        with pytest.raises(error, match=name):
            sides.step(*batch(1))
        assert not sides.step.is_unfinished
        sides.managed.load_state_dict(before)


@pytest.mark.long
def test_checks_of_values_that_follow_from_parameters_are_made_in_the_step() -> None:
    sides = Sides(policy_loss, budget="smallest")
    for one in BATCHES[:3]:
        sides.train(*one)
    assert len(sides.step.plans) == 1
    assert_it_raises_its_own_errors(sides)
    sides.managed.load_state_dict(sides.plain.state_dict())
    sides.train(*batch(2))


@pytest.mark.long
def test_checks_are_made_with_inductor_too() -> None:
    sides = Sides(policy_loss, backend="inductor", budget="smallest")
    sides.step(*batch(1))
    assert_it_raises_its_own_errors(sides)
    assert sides.step(*batch(2)).isfinite()
    (plan,) = sides.step.plans
    assert sides.step.peak_bytes <= plan.peak_bytes


def test_without_a_real_batch_values_are_not_invented() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        net, x, mask = Net(), torch.empty(8, 12), torch.empty(8, dtype=torch.bool)
    step = overspill.train_step(net, asks_all, torch.optim.SGD(net.parameters(), 0.1), budget="1GiB")
    with pytest.raises(UnsupportedError, match="real batch"):
        step.graph(x, mask)


@pytest.mark.long
def test_inductor_goes_the_way_that_values_lead() -> None:
    def stock() -> Iterator[tuple[Tensor, Net]]:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        ways: dict[bool, Callable[..., Tensor]] = {
            True: torch.compile(lambda net, x, mask: net(x).square().mean(), dynamic=False),
            False: torch.compile(lambda net, x, mask: (net(x) * mask[:, None]).abs().mean(), dynamic=False),
        }
        for seed, (x, mask) in enumerate(BATCHES[:3]):
            torch.manual_seed(seed)
            loss = ways[bool(mask.all())](net, x, mask)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach(), net

    expected = list(stock())
    sides = Sides(asks_all, backend="inductor")
    for seed, (one, (loss, _)) in enumerate(zip(BATCHES[:3], expected, strict=True)):
        torch.manual_seed(seed)
        assert same_bits(sides.step(*one), loss)
    assert all(map(same_bits, sides.managed.parameters(), expected[-1][1].parameters()))


@pytest.mark.long
def test_inductor_has_the_shapes_that_values_lead_to() -> None:
    sides = Sides(asks_rows, backend="inductor")
    stock = torch.compile(lambda net, x, rows: net(x[rows]).square().mean() + rows.float().mean(), dynamic=False)
    for seed, (x, mask) in enumerate(BATCHES[:3]):
        torch.manual_seed(seed)
        loss = stock(sides.plain, x, mask.nonzero()[:, 0])
        loss.backward()
        sides.optimizers[0].step()
        sides.optimizers[0].zero_grad()
        torch.manual_seed(seed)
        assert same_bits(sides.step(x, mask), loss.detach())
    assert all(map(same_bits, sides.managed.parameters(), sides.plain.parameters()))


def asks_whether_compiled(net: Net, x: Tensor, mask: Tensor) -> Tensor:
    told = torch.compiler.is_compiling() + 2 * torch.compiler.is_dynamo_compiling() + 4 * torch.compiler.is_exporting()
    told = (
        told
        + 8 * torch._dynamo.is_compiling()
        + 16 * torch.jit.is_tracing()
        + 32 * torch.fx._symbolic_trace.is_fx_tracing()
    )
    return net(x).sum() * 0 + told + mask.sum() * 0


def test_code_by_compile_that_asks_whether_it_is_exported_is_told_no() -> None:
    model = nn.Linear(8, 8)

    def loss(x: Tensor) -> Tensor:
        return model(x).square().mean() * (2 if torch.compiler.is_exporting() else 1)

    x = torch.randn(4, 8)
    assert same_bits(overspill.compile(loss, budget="smallest")(x), loss(x))


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_code_that_asks_whether_it_is_compiled_is_told_what_the_reference_tells_it(backend: str) -> None:
    reference = asks_whether_compiled if backend == "eager" else torch.compile(asks_whether_compiled, dynamic=False)
    expected = reference(Net(), *batch(1)).item()
    assert (expected > 0) == (backend == "inductor")
    assert Sides(asks_whether_compiled, backend=backend).step(*batch(1)).item() == expected
