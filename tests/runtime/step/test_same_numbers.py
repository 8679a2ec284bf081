"""Layers whose kernels or precision a tracer is tempted to change: both doors give plain PyTorch's numbers to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.core.errors import InfeasibleBudgetError, UnsupportedError
from overspill.runtime.reachable import same_bits

STEPS = 3
Around = Callable[[], AbstractContextManager[object]]


class Recurrent(nn.Module):
    """A recurrent network that reads 5 steps of 6 features."""

    def __init__(self, kind: str, units: int = 8, **settings: object) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.layer = getattr(nn, kind)(6, units, **settings)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x))[0].float().square().mean()


class Packed(Recurrent):
    """The same on sequences of different lengths, whose means count."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, enforce_sorted=False)
        out, state = self.layer(packed)
        padded, found = nn.utils.rnn.pad_packed_sequence(out, padding_value=0.5, total_length=6)
        mask = torch.arange(6)[:, None] < found
        return ((padded * mask[..., None]).sum(0) / found[:, None]).square().mean() + state[0].sum()


class Dropped(nn.Module):
    """Linear layers and dropout in one precision."""

    def __init__(self, share: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.share = share
        self.first, self.second = nn.Linear(6, 40, dtype=dtype), nn.Linear(40, 8, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(self.first(x.to(self.first.weight.dtype)), self.share)
        return F.dropout(self.second(y), self.share).float().square().mean()


class Transposed(nn.Module):
    """Numbers drawn into tensors whose rows are not adjacent, by dropout and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).transpose(0, 1).bfloat16()
        noise = torch.empty_like(y).bernoulli_(0.4) + torch.empty_like(y).normal_() + torch.empty_like(y).uniform_()
        return (F.dropout(y, 0.3) * (noise + torch.empty_like(y).exponential_())).float().square().mean()


class Experts(nn.Module):
    """Four experts, each with its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.weight = nn.Parameter(torch.randn(4, 8, 12))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 3, 9, 15], dtype=torch.int32)
        return F.grouped_mm(self.first(x).flatten(0, 1), self.weight, offs=ends).square().mean()


class Mixed(nn.Module):
    """A weight that two ops read, a region without autocast, dropout, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.exact, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.conv, self.norm = nn.Conv1d(3, 3, 3, padding=1), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        y = self.twice(F.gelu(self.twice(x)))
        with torch.autocast("cpu", enabled=False):
            y = self.exact(y.float())
        y = F.dropout(self.conv(self.last(self.norm(y))), 0.3)
        return F.scaled_dot_product_attention(y, y, y).float().square().mean()


class Solved(nn.Module):
    """The solution of linear equations, and a decomposition, in which PyTorch checks that there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6) + 6 * torch.eye(6))

    def forward(self, x: Tensor) -> Tensor:
        factor = torch.linalg.cholesky(self.weight @ self.weight.mT)
        return (
            torch.linalg.solve(self.weight, x.mT).square().mean()
            + factor.sum()
            + torch.linalg.eigvals(factor).abs().sum()
        )


class Turned(nn.Module):
    """Complex numbers whose parts are two weights."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.turn = nn.Parameter(torch.rand(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return (x * torch.complex(-self.decay.exp(), self.turn).exp()).real.square().mean()


class InPlace(nn.Module):
    """Convolutions of tensors that are changed in place, one with sizes of 1 and one in which places are added to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv3d(3, 64, 1), nn.Conv3d(64, 64, 3, padding=1), nn.Conv2d(64, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x[:, :, None, None].contiguous(memory_format=torch.channels_last_3d))
        y = self.second(F.leaky_relu(F.adaptive_avg_pool3d(y, 1), inplace=True))
        y = y[..., 0].expand(-1, -1, 6, 6).contiguous(memory_format=torch.channels_last) * x.mean()
        y.scatter_add_(
            3, torch.zeros(5, 64, 6, 1, dtype=torch.long), x.mean((1, 2)).sin().view(5, 1, 1, 1).expand(5, 64, 6, 1)
        )
        return self.third(y).square().mean()


def mixed_precision() -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Unmatched(nn.Module):
    """Boxes of which none is matched, so that losses are means of nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        boxes = self.linear(x)
        none = boxes[:0]
        losses = [loss(none, none.detach()).nan_to_num() for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss)]
        return boxes.square().mean() + sum(losses)


CASES: dict[str, tuple[Callable[[], nn.Module], Around]] = {
    "LSTM": (lambda: Recurrent("LSTM"), nullcontext),
    "LSTM, two layers both ways with dropout": (
        lambda: Recurrent("LSTM", num_layers=2, bidirectional=True, dropout=0.3, batch_first=True), nullcontext,
    ),
    "LSTM with projection": (lambda: Recurrent("LSTM", proj_size=4), nullcontext),
    "GRU": (lambda: Recurrent("GRU", num_layers=2, bidirectional=True), nullcontext),
    "GRU whose units leave a rest": (lambda: Recurrent("GRU", 40, bidirectional=True), nullcontext),
    "GRU whose units leave no rest": (lambda: Recurrent("GRU", 64), nullcontext),
    "GRU whose units leave a rest under autocast": (lambda: Recurrent("GRU", 40), mixed_precision),
    "RNN": (lambda: Recurrent("RNN", nonlinearity="relu"), nullcontext),
    "LSTM under autocast": (lambda: Recurrent("LSTM"), mixed_precision),
    "GRU under autocast": (lambda: Recurrent("GRU"), mixed_precision),
    "dropout in float32 whose factor rounds twice": (lambda: Dropped(0.15, torch.float32), nullcontext),
    "dropout in bfloat16": (lambda: Dropped(0.3, torch.bfloat16), nullcontext),
    "dropout in float16": (lambda: Dropped(0.3, torch.float16), nullcontext),
    "draws into rows that are not adjacent": (Transposed, nullcontext),
    "autocast with a region without": (Mixed, mixed_precision),
    "no autocast": (Mixed, nullcontext),
    "linear equations": (Solved, nullcontext),
    "products of groups in float32": (Experts, nullcontext),
    "convolutions of what is changed in place": (InPlace, nullcontext),
    "complex numbers of two weights": (Turned, nullcontext),
    "losses of nothing": (Unmatched, nullcontext),
}  # fmt: skip
LIKE_ANOTHER = {
    "LSTM", "GRU", "RNN", "GRU under autocast", "GRU whose units leave a rest under autocast", "LSTM with projection",
    "GRU whose units leave a rest", "GRU whose units leave no rest", "dropout in float16", "no autocast",
    "LSTM under autocast", "autocast with a region without", "linear equations", "draws into rows that are not adjacent", "dropout in float32 whose factor rounds twice",
}  # fmt: skip
"""What takes the way of another case; in the long suite."""


def plainly(
    model: nn.Module, x: Tensor, around: Around, call: Callable[[Tensor], Tensor] | None = None
) -> list[Tensor]:
    """The losses of a plain training loop, of which `call` is the model's part; the update needs no gradient scaling."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(5)
    losses = []
    for _ in range(STEPS):
        with around():
            loss = model(x) if call is None else call(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def by_step(model: nn.Module, x: Tensor, around: Around, budget: str | float) -> list[Tensor]:
    """The losses of planned steps."""
    step = overspill.train_step(model, None, torch.optim.AdamW(model.parameters(), 1e-2), budget=budget)
    torch.manual_seed(5)
    losses = []
    try:
        for _ in range(STEPS):
            with around():
                losses.append(step(x))
    finally:
        step.close()
    return losses


def assert_same(plain: nn.Module, losses: list[Tensor], model: nn.Module, found: list[Tensor]) -> None:
    assert all(map(same_bits, losses, found)), f"{losses} are not {found}"
    differing = [
        n for (n, p), q in zip(plain.named_parameters(), model.parameters(), strict=True) if not same_bits(p, q)
    ]
    assert not differing


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.long if c in LIKE_ANOTHER else ()) for c in CASES])
def test_both_doors_train_as_plain_pytorch_does(case: str) -> None:
    torch.manual_seed(0)
    make, around = CASES[case]
    plain = make()
    compiled, stepped = copy.deepcopy(plain), copy.deepcopy(plain)
    x = torch.randn(5, 3, 6)
    losses = plainly(plain, x, around)
    torch._dynamo.reset()
    call = overspill.compile(compiled, budget="1GiB")
    assert_same(plain, losses, compiled, plainly(compiled, x, around, call))
    assert len(call.overspill.plans) == 1
    assert_same(plain, losses, stepped, by_step(stepped, x, around, "1GiB"))


@pytest.mark.long
def test_a_recurrent_layer_trains_in_the_smallest_budget() -> None:
    torch.manual_seed(0)
    plain = Recurrent("LSTM", num_layers=3)
    model, x = copy.deepcopy(plain), torch.randn(50, 16, 6)
    losses = plainly(plain, x, nullcontext)
    budget = 1  # found by being refused: the floor of the floor's own plan may be a little higher
    while True:
        try:
            found = by_step(model, x, nullcontext, f"{budget}B")
            break
        except InfeasibleBudgetError as refusal:
            if refusal.floor_bytes <= budget:
                raise
            budget = refusal.floor_bytes
    assert_same(plain, losses, model, found)


def test_a_matrix_without_an_inverse_is_an_error_as_in_eager() -> None:
    model = Solved()
    model.weight.data.zero_()
    step = overspill.train_step(model, None, torch.optim.SGD(model.parameters(), 0.1), budget="1GiB")
    with pytest.raises(torch.linalg.LinAlgError):
        step(torch.randn(5, 3, 6))
    step.close()


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("RNN", {}),
        pytest.param("GRU", {"bidirectional": True}, marks=pytest.mark.long),
        pytest.param("LSTM", {"num_layers": 2, "bidirectional": True, "dropout": 0.3}, marks=pytest.mark.long),
    ],
)
def test_packed_sequences_train_as_in_plain_pytorch_whatever_their_lengths(kind: str, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    plain = Packed(kind, **settings)
    compiled, stepped = copy.deepcopy(plain), copy.deepcopy(plain)
    batches = [(torch.randn(5, 3, 6), torch.tensor(lengths)) for lengths in ([2, 5, 4], [1, 1, 3], [2, 5, 4])]
    torch._dynamo.reset()
    # Dynamo before 2.13 fails at pad_packed_sequence.
    call = overspill.compile(compiled, budget="1GiB") if torch.__version__ >= "2.13" else compiled
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2) for m in (plain, compiled, stepped)]
    step = overspill.train_step(stepped, None, optimizers[2], budget="1GiB")
    for index, batch in enumerate(batches):
        losses = []
        for model, optimizer in zip((plain, call), optimizers, strict=False):
            torch.manual_seed(index)
            losses.append(model(*batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.manual_seed(index)
        losses.append(step(*batch))
        for model, loss in zip((compiled, stepped), losses[1:], strict=True):
            assert_same(plain, losses[:1], model, [loss])
    assert len(step.plans) == 2  # one for each kind of lengths
    step.close()


def test_with_inductors_kernels_packed_sequences_are_refused_by_name() -> None:
    model = Packed("LSTM")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = overspill.train_step(model, None, optimizer, budget="1GiB", backend="inductor")
    with pytest.raises(UnsupportedError):
        step(torch.randn(5, 3, 6), torch.tensor([2, 5, 4]))
    step.close()


def test_a_gradient_scaler_scales_as_in_plain_training() -> None:
    torch.manual_seed(0)
    plain = Mixed()
    model, x = copy.deepcopy(plain), torch.randn(5, 3, 6)
    torch._dynamo.reset()
    found = []
    for each, call in ((plain, plain), (model, overspill.compile(model, budget="1GiB"))):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        scaler = torch.amp.GradScaler("cpu")
        torch.manual_seed(5)
        for _ in range(STEPS):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = call(x)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found.append(loss.detach())
    assert_same(plain, found[:1], model, found[1:])


class Causal(nn.Module):
    """Makes its mask itself, and leaves it to nn.TransformerEncoder to find out that it is causal."""

    def __init__(self, mask: Callable[[int], Tensor] = nn.Transformer.generate_square_subsequent_mask) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 12, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.encoder(x, mask=self.mask(x.shape[1]))
        return y.square().mean()


def test_a_transformer_encoder_with_a_causal_mask_is_one_step() -> None:
    torch.manual_seed(0)
    plain = Causal()
    model = copy.deepcopy(plain)
    x = torch.randn(5, 3, 6)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (plain, model)]
    step = overspill.train_step(model, None, optimizers[1], budget="1GiB", store="host")
    for _ in range(2):
        optimizers[0].zero_grad()
        loss = plain(x)
        loss.backward()
        optimizers[0].step()
        assert torch.equal(step(x), loss)
    step.synchronize()
    assert all(map(torch.equal, plain.parameters(), model.parameters()))
