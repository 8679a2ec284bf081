"""Programs as people write them, each by each way: the bits of plain PyTorch within the budget, or a refusal in one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.programs import IDENTICAL, PROGRAMS, REFUSED, harness, judge
from tests.programs.expected import REFUSALS
from tests.programs.harness import COMPILE, INDUCTOR, Budgeted, Made, Memory, Program
from torch import nn

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

BY_INDUCTOR = (
    "gan", "vae", "dcgan", "diffusion", "tied-autoencoder", "vit", "convnext", "unet", "segmentation",
    "super-resolution", "channels-last", "deep-supervision", "evaluation-and-partial-batches", "cumulative-batch-norm",
    "siamese", "twins", "simclr", "triplet", "graph-attention", "message-passing", "gpt", "accumulation",
    "transformer-encoder", "seq2seq", "buckets", "layer-drop", "lora", "distillation",
    "moving-average", "autocast", "grad-scaler", "checkpointed", "custom-function", "thawing", "experts", "routed-experts",
    "reinforce", "gru-lbfgs", "gru-narrow", "multi-task", "parametrized", "dropouts", "lstm-language-model",
)  # fmt: skip
"""Those that are tried with Inductor's kernels too, against stock torch.compile."""
WAYS = [
    *((name, way) for name, found in PROGRAMS.items() for way in found.ways),
    *((name, INDUCTOR) for name in BY_INDUCTOR),
]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), [pytest.param(*case, id="-by-".join(case)) for case in WAYS])
def test_a_program_trains_with_the_same_bits_within_the_budget(name: str, way: str) -> None:
    found = judge(PROGRAMS[name], way)
    if (name, way) in REFUSALS:
        assert found.outcome.startswith(REFUSED)
        assert REFUSALS[name, way] in found.outcome
    else:
        assert found.outcome == IDENTICAL
        assert 0 < found.peak_bytes <= found.budget_bytes < found.plain_peak_bytes
        assert found.plans > 0


# -- what is wrong is seen


def small(memory: Memory, kept_elements: int = 1) -> Made:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = memory.compile(model)
    kept = torch.zeros(kept_elements)
    for _ in range(2):
        loss = model(torch.randn(512, 64)).mean() + kept.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


@torch.no_grad()
def nudged(_: Memory, model: nn.Sequential) -> nn.Sequential:
    """The model with another last bit in each of some weights."""
    model[0].weight.copy_(torch.nextafter(model[0].weight, torch.ones(1)))
    return model


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(harness, "MOST_TRIED", 1)
    return lambda make=small: judge(Program("small", "a small program", make, (COMPILE,), 0.9), COMPILE).outcome


def test_a_program_that_is_planned_is_identical(judged: Any) -> None:
    assert judged() == IDENTICAL


def test_a_model_that_is_not_planned_is_seen(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budgeted, "compile", Memory.compile)
    assert judged() == "no plan was made"


def test_another_last_bit_is_seen(judged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Budgeted, "compile", nudged)
    assert judged().startswith("different in step 0: ")


def test_what_a_program_keeps_beyond_the_budget_is_measured(judged: Any) -> None:
    assert judged(lambda memory: small(memory, 2**20)).endswith("over the budget")
