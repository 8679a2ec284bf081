"""Language models whose losses run in pieces of rows: the bits of plain PyTorch within less memory, either way in."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tests.runtime.step.whole_steps import CPU
from tests.turns import rest_long
from torch import Tensor, nn
from torch.nn import functional as F

import overspill
from overspill.capture.compiled import pieces
from overspill.core import Verb
from overspill.job import Job
from overspill.models import load
from overspill.plans.comparison import compare
from overspill.policies import POLICIES
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options
from overspill.runtime.preview import compare_job, step_of, sweep_job
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes

WORDS, WIDTH = 600, 16


class Model(nn.Module):
    """Embedding, attention with a padding mask, and a head over all words; with targets it returns its loss."""

    def __init__(self, *, tied: bool, loss: Callable[[Tensor, Tensor], Tensor], autocast: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.loss, self.autocast = loss, autocast

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, self.autocast):
            scores = self.head(self.block(self.embed(words), src_key_padding_mask=targets == -100))
            return self.loss(scores, targets)


def usual(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.float().flatten(0, -2), targets.flatten())


def smoothed(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), label_smoothing=0.1)


def with_z_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return usual(scores, targets) + 1e-4 * scores.float().logsumexp(-1).square().mean()


def summed(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="sum") / (targets != -100).sum()


CASES = {
    "usual, in bfloat16": (usual, True, True),
    "usual, not tied": (usual, False, False),
    "smoothed": (smoothed, True, False),
    "with z-loss": (with_z_loss, True, True),
    "summed": (summed, True, False),
}


def batch(rows: int) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(rows)
    words, targets = (torch.randint(0, WORDS, (3, rows), generator=drawn) for _ in range(2))
    targets[0, 2 * rows // 3 :] = -100
    return words, targets


def trained(step: Callable[..., Tensor], rows: int, optimizer: torch.optim.Optimizer | None = None) -> list[Tensor]:
    losses, given = [], batch(rows)
    for index in range(3):
        torch.manual_seed(index)
        loss = step(*given)
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def three(case: str) -> tuple[nn.Module, nn.Module, nn.Module]:
    loss, tied, autocast = CASES[case]
    torch.manual_seed(0)
    model = Model(tied=tied, loss=loss, autocast=autocast)
    return model, copy.deepcopy(model), copy.deepcopy(model)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


@pytest.mark.parametrize("rows", [37, pytest.param(64, marks=pytest.mark.long)])
@pytest.mark.parametrize("case", rest_long(CASES, ["with z-loss"]))
def test_the_smallest_budget_gives_the_bits_of_plain_pytorch_within_the_plan(case: str, rows: int) -> None:
    plain, whole, compiled = three(case)
    expected = trained(plain, rows, adam(plain))
    # The whole step.
    step = overspill.train_step(whole, lambda m, *given: m(*given), adam(whole), budget="smallest", store="host")
    step.tracker = LiveBytes(CPU)
    found = trained(step, rows)
    assert step.tracker.peak_bytes <= step.peak_bytes
    # The compiled model, with its loss inside.
    session = Session(budget="smallest", store="host")
    session.tracker = LiveBytes(CPU)
    again = trained(overspill.compile(compiled, session=session), rows, adam(compiled))
    for losses, model in ((found, whole), (again, compiled)):
        assert all(same_bits(*pair) for pair in zip(losses, expected, strict=True))
        assert all(same_bits(*pair) for pair in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.long
def test_pieces_lie_at_planned_addresses() -> None:
    plain, whole, _ = three("usual, in bfloat16")
    step = overspill.train_step(
        whole, lambda m, *given: m(*given), adam(whole), budget="smallest", store="host", placement="planned"
    )
    expected, found = trained(plain, 64, adam(plain)), trained(step, 64)
    assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
    assert all(same_bits(*pair) for pair in zip(whole.parameters(), plain.parameters(), strict=True))
    (plan,) = step.plans
    names = {plan.graph.ops[i.target].name for i in plan.schedule.instructions if i.verb is Verb.RUN}
    assert "empty" in names
    assert plan.places is not None
    assert plan.places.arena_bytes <= 1.1 * plan.peak_bytes
    step.close()


def floor_of_a_step() -> int:
    _, whole, _ = three("usual, in bfloat16")
    step = overspill.train_step(whole, lambda m, *given: m(*given), adam(whole), store="host")
    return step.smallest_budget(*batch(64))


@pytest.mark.long
def test_the_floor_falls_where_the_loss_holds_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    less = floor_of_a_step()
    monkeypatch.setattr(pieces, "SHARE", 0)  # one piece
    assert less < 0.7 * floor_of_a_step()


@pytest.mark.long
def test_a_plan_in_pieces_is_compared_with_the_step_of_plain_pytorch() -> None:
    _, whole, other = three("usual, in bfloat16")
    step = overspill.train_step(whole, lambda m, *given: m(*given), adam(whole), budget="smallest", store="host")
    step(*batch(64))
    (plan,) = step.plans
    usual_graph = step.graph(*batch(64))
    assert len(plan.graph.ops) > len(usual_graph.ops)
    assert plan.in_core_seconds < plan.unmanaged_timeline.step_seconds
    roomy = overspill.train_step(other, lambda m, *given: m(*given), adam(other), budget="1GiB", store="host")
    roomy(*batch(64))
    assert roomy.plans[0].graph.without_frames() == usual_graph.without_frames()
    assert roomy.plans[0].unmanaged_peak_bytes == plan.unmanaged_peak_bytes


def test_policies_of_papers_get_the_step_as_it_is() -> None:
    assert [name for name in POLICIES if Options(policy=name).in_pieces] == ["auto"]


@pytest.mark.long
def test_comparisons_and_sweeps_plan_in_pieces_where_the_step_as_it_is_does_not_fit() -> None:
    job = Job(lambda: load("decoder:width=32,depth=1,heads=2,vocabulary=3000,seq_len=64"), 8, "adamw")
    options = Options(whole_step=True)
    floor = sweep_job(job, options, ["auto"], 2).floors["auto"].nbytes
    within = replace(options, budget=floor)
    (row,) = compare_job(job, within, ["auto"])
    assert row.fits
    usual_step = step_of(job, options)
    assert row.plan is not None
    assert len(row.plan.graph.ops) > len(usual_step.graph.ops)
    (usual,) = compare(usual_step.graph, usual_step.account.device, ["auto"], floor)
    assert not usual.fits
