"""Micro-batches beside one another, layer by layer: the choice, and the bits of plain accumulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, Mlp, Pair, planned_peak
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.capture.compiled.whole_step import ACCUMULATE
from overspill.core import Phase
from overspill.devices import load_device
from overspill.planning.effort import at_effort

WORDS = 40
MakeModel = Callable[[], nn.Module]
FAR = replace(load_device("cpu"), prefetch_bytes_per_second=2e8, offload_bytes_per_second=2e8)
"""A device whose store is so far away that weights are best read once."""


class Block(nn.Module):
    """A residual block; `drop` draws random numbers in training."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(drop)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Decoder(nn.Module):
    """Blocks, one of them frozen, between an embedding and an output layer of the same weight."""

    def __init__(self, drop: float = 0.0, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Block(width, drop) for _ in range(4))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.layers[1].requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def pair_of(count: int, model: MakeModel = Decoder, **options: Any) -> Pair:
    gradients = {"accumulate": count, "clip_norm": options.pop("clip_norm", None)}
    given = {"policy": "auto", "budget": "250KiB", "device": FAR} | options
    pair = Pair(model, OPTIMIZERS["adamw"], gradients, given, size=2 * count)
    if isinstance(pair.model, Decoder):
        drawn = torch.randint(0, WORDS, (2 * count, 7), generator=torch.Generator().manual_seed(3))
        pair.inputs = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    return pair


@pytest.mark.parametrize(
    ("count", "options"),
    [
        (2, {}),
        (3, {"clip_norm": 0.1}),
        (3, {"placement": "planned", "budget": "300KiB"}),
        (2, {"update": "host", "store": "host"}),
    ],
    ids=["two", "three, clipped", "in an arena", "updates on the host"],
)
def test_micro_batches_beside_one_another_have_the_bits_of_plain_accumulation(
    count: int, options: dict[str, Any]
) -> None:
    with at_effort(0.05):
        pair = pair_of(count, **options)
        pair.train(3)
        assert pair.step.one_by_one == ""
        (plan,) = pair.step.plans
        assert plan.micro_batches == count
        assert plan.micro_batches == pair.step.plan(*pair.inputs).micro_batches
        assert pair.measured_peak() <= planned_peak(pair.step)
        # A last batch of another size has a plan of its own; one that they do not divide is refused.
        pair.train(1, tuple(x[:count] for x in pair.inputs))
        pair.train(1)
        with pytest.raises(overspill.errors.RequestError, match="equal micro-batches"):
            pair.step(*(x[: count + 1] for x in pair.inputs))
    pair.assert_same()


def test_a_weight_comes_once_for_all_micro_batches_in_forward_and_once_in_backward() -> None:
    with at_effort(0.05):
        pair = pair_of(3)
        plan = pair.step.plan(*pair.inputs)
    ops, tensors = plan.graph.ops, plan.graph.tensors
    (weight,) = (t.id for t in tensors if t.name == "layers.2.up.weight")
    reads = [op.id for op in ops if weight in op.reads and op.phase is not Phase.UPDATE]
    others = [op.layer for op in ops[reads[0] : reads[2]] if not op.layer.startswith("layers.2.")]
    assert len(reads) == 6
    assert others == []  # between its first reader and its last in forward
    # Each gradient is summed in the order of the micro-batches, and never leaves between two of them.
    sums = [op for op in ops if op.name == ACCUMULATE]
    made_by = {op.writes[0]: tensors[op.writes[0]] for op in sums}
    assert not any(total.persistent for total in made_by.values())
    assert len(sums) == 3 * len(made_by)


class Still(Mlp):
    """One with batch norm, and nothing random."""

    def __init__(self) -> None:
        super().__init__()
        self.drop.p = 0.0


REFUSED: dict[str, tuple[MakeModel, dict[str, Any], str]] = {
    "draws": (lambda: Decoder(0.1), {}, "random numbers"),
    "statistics": (Still, {}, "norm.running"),
    "policy": (Decoder, {"policy": "window"}, "window"),
    "all in memory": (Decoder, {"budget": "1GiB"}, "one after another they take"),
}


@pytest.mark.parametrize(("model", "options", "why"), REFUSED.values(), ids=REFUSED)
def test_where_they_may_not_or_it_gains_nothing_they_run_one_after_another(
    model: MakeModel, options: dict[str, Any], why: str
) -> None:
    with at_effort(0.02):
        pair = pair_of(2, model, **{"budget": "smallest", **options})
        pair.train(2)
    assert why in pair.step.one_by_one
    assert len(pair.step.plans) == 2
    pair.assert_same()
