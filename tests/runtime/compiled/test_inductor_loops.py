"""With Inductor's kernels, loops within less than weights, gradients and state have the bits of stock torch.compile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

from loop_trials import IDENTICAL, judged, run
from loops_by_library import LOOPS
from loops_by_library.loop import INDUCTOR, Line, Loop, Trained

pytestmark = pytest.mark.usefixtures("forget_compiled_code")
WIDTH, WORDS = 64, 96
SIZES = [*[WIDTH] * 5, WORDS]
PLAIN = partial(nn.Linear, bias=False)  # no kernel of its own, which takes seconds to compile


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attention, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, 4, WIDTH // 4)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + functional.dropout(self.out(attended), self.dropout)
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class LowRank(nn.Module):
    """A frozen linear layer with a trained correction of rank 4."""

    def __init__(self, of: nn.Linear) -> None:
        super().__init__()
        self.of = of.requires_grad_(False)
        self.first, self.second = nn.Linear(of.in_features, 4, bias=False), nn.Linear(4, of.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.of(x) + self.second(functional.dropout(self.first(x), 0.1))


class Decoder(nn.Module):
    def __init__(self, *, dropout: float = 0.0, tied: bool = False, lora: bool = False, breaks: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.breaks = breaks
        if tied:
            self.head.weight = self.embed.weight
        if lora:
            self.requires_grad_(False)
            for block in self.blocks:
                block.up, block.down, block.attention = map(LowRank, (block.up, block.down, block.attention))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
            if self.breaks:
                torch._dynamo.graph_break()
        return self.head(x)


def loop(
    line: Line, *, sizes: tuple[int, ...] = (4, 4, 4, 4), accumulate: int = 1, clips: bool = False,
    autocast: bool = False, evaluates: bool = False, model: Callable[..., nn.Module] = Decoder, **how: Any,
) -> Trained:  # fmt: skip
    torch.manual_seed(0)
    original = model(**how)
    optimizer = torch.optim.AdamW([p for p in original.parameters() if p.requires_grad], lr=1e-2)
    compiled, figures = line.module(original), []
    for step, size in enumerate(sizes):
        for part in range(accumulate):
            drawn = torch.Generator().manual_seed(step * accumulate + part)
            x, y = torch.randint(WORDS, (2, size, 12), generator=drawn)
            with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                loss = functional.cross_entropy(compiled(x).flatten(0, 1).float(), y.flatten())
            (loss / accumulate).backward()
            figures.append(loss.item())
        if clips:
            figures.append(nn.utils.clip_grad_norm_(original.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        if evaluates:
            with torch.no_grad():
                figures.append(compiled(x).sum().item())
    return Trained(figures, [original], [optimizer])


CASES: dict[str, tuple[float, dict[str, Any]]] = {
    "small": (0.6, {"model": lambda: nn.Sequential(nn.Embedding(WORDS, WIDTH), *map(PLAIN, SIZES, SIZES[1:]))}),
    "decoder": (0.65, {"evaluates": True}),
    "tied, autocast": (0.8, {"tied": True, "autocast": True, "clips": True}),
    "lora, odd batches": (0.7, {"lora": True, "dropout": 0.1, "sizes": (4, 4, 3, 4, 3)}),
    "accumulated": (0.7, {"accumulate": 2, "clips": True, "dropout": 0.1}),
    "graph breaks": (0.7, {"breaks": True}),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "small" else [pytest.mark.long]) for name in CASES]
)
def test_less_than_weights_and_state_is_enough(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share, how = CASES[name]
    monkeypatch.setitem(LOOPS, "test", Loop("test", "tests", "", lambda line: loop(line, **how), ()))
    plain = run("test", None, backend=INDUCTOR)
    torch._dynamo.reset()
    budget = int(share * plain.owned_bytes)
    found = judged("test", str(budget), plain, run("test", budget, backend=INDUCTOR))
    assert found.kind == IDENTICAL, f"{found.said}\n{found.traceback}"
