"""Losses that are made outside of the compiled model fit within its budget, with their targets."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from tests.turns import rest_long
from torch import Tensor, nn

import overspill
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Upscaling(nn.Module):
    """Super-resolution: the output is larger than anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, 16, 3, padding=1) for c in (3, 16, 16, 16))
        self.last = nn.Conv2d(16, 27, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return F.pixel_shuffle(self.last(x), 3)


class Language(nn.Module):
    """Logits over a vocabulary, which are larger than the model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 32, dtype=dtype)
        self.hidden = nn.Linear(32, 128, dtype=dtype)
        self.last = nn.Linear(128, 512, dtype=dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.last(F.gelu(self.hidden(self.embedding(tokens))))


class Segmentation(nn.Module):
    """One or more values a pixel."""

    def __init__(self, values: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(c, 8, 3, padding=1) for c in (3, 8, 8))
        self.last = nn.Conv2d(8, values, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


def dice(logits: Tensor, target: Tensor) -> Tensor:
    share = torch.sigmoid(logits)
    common, both = (share * target).sum((1, 2, 3)), share.sum((1, 2, 3)) + target.sum((1, 2, 3))
    return 1 - ((2 * common + 1) / (both + 1)).mean()


def next_token(logits: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 24, 24), torch.randn(4, 3, 72, 72)


def tokens() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 512, (4, 64)), torch.randint(0, 512, (4, 64))


def masks(values: int = 1) -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 48, 48), torch.rand(4, values, 48, 48).round()


OUTSIDE: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], Callable[..., Tensor]]] = {
    "mse": (Upscaling, pictures, F.mse_loss),
    "l1": (Upscaling, pictures, F.l1_loss),
    "cross-entropy": (Language, tokens, next_token),
    "cross-entropy of bfloat16": (lambda: Language(torch.bfloat16), tokens, next_token),
    "bce": (Segmentation, masks, F.binary_cross_entropy_with_logits),
    "dice": (Segmentation, masks, dice),
    "dice and bce": (
        lambda: Segmentation(4),
        lambda: masks(4),
        lambda o, y: dice(o, y) + F.binary_cross_entropy_with_logits(o, y),
    ),
}


SHORT = "mse", "cross-entropy"


@pytest.mark.parametrize("name", rest_long(OUTSIDE, SHORT))
def test_a_loss_outside_of_the_model_fits_with_its_targets(name: str) -> None:
    make, batch, loss_of = OUTSIDE[name]
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    session = overspill.Session(budget="smallest", store="host")
    states, peaks = [], []
    for net, call in ((plain, plain), (model, overspill.compile(model, session=session))):
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        out = loss = None  # which a training loop holds until it has the next ones
        for step in range(3):
            torch.manual_seed(step)
            x, y = batch()
            optimizer.zero_grad()
            tracker = LiveBytes(torch.device("cpu"))
            tracker.add([x, y, out, loss, *net.parameters()])
            tracker.add(v for state in optimizer.state.values() for v in state.values())
            session.tracker = tracker if net is model else None
            out = call(x)
            with tracker if step else nullcontext():
                loss = loss_of(out, y)
                loss.backward()
                optimizer.step()
            peaks.append(tracker.peak_bytes)
        states.append([v.clone() for v in net.state_dict().values()])
    assert all(map(same_bits, *states))
    assert max(peaks[-2:]) <= session.plans[0].budget_bytes
