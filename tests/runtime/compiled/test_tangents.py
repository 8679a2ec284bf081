"""What autograd gives a compiled model's backward: nothing for some outputs, or gradients in another order in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import overspill


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
