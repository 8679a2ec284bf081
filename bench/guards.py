"""What it costs `train_step` to look, before each step, whether the model is still what was captured, and its values alike.

    python bench/guards.py [--steps 20] [--out bench/results/guards.json]

Three jobs: GPT-2 (a batch of one, 128 tokens), a perceptron whose step takes about 5 ms, and a BERT of two narrow layers, padded,
which asks its mask. The checks are timed where they are called, in the steps themselves; the ratio is a step with them over the
same step without. About two minutes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from paired import json_record
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM

import overspill
from overspill.capture.compiled.guards import Guards
from overspill.models import load
from overspill.models.step import TrainingStep
from overspill.runtime.step.python_state import PythonState
from overspill.runtime.step.state import StepState

CHECKS = (
    (Guards, "difference"),
    (PythonState, "changed"),
    (StepState, "check_model"),
    (StepState, "adopt_parameters"),
    (StepState, "adopt_optimizer"),
)


class Watch:
    """Adds up the seconds that are spent in some methods."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in CHECKS:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            begun = time.perf_counter()
            try:
                return method(*args)
            finally:
                self.seconds += time.perf_counter() - begun

        return run


def gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The job as a module that returns its loss, and a batch."""
    job = load("gpt2", seq_len=128)
    return TrainingStep(job), job.make_batch(1)


def perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Ten layers of 256 units."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(256, 256), nn.ReLU())))

        def forward(self, x: Tensor) -> Tensor:
            """A scalar."""
            return self.layers(x).square().mean()

    return Net(), (torch.randn(128, 256),)


def padded() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model that returns its loss, and a batch whose mask has padding."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertForMaskedLM(
                BertConfig(
                    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
                )
            )

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            """A scalar."""
            return self.bert(input_ids=words, attention_mask=mask, labels=words).loss

    return Net(), (torch.randint(5, 128, (4, 32)), (torch.arange(32) < torch.tensor([[20], [32], [25], [32]])).long())


def main() -> None:
    """Time the jobs and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "guards.json")
    arguments = parser.parse_args()
    watch, rows = Watch(), []
    for make in (gpt2, perceptron, padded):
        torch.manual_seed(0)
        model, batch = make()
        step = overspill.train_step(model, None, torch.optim.SGD(model.parameters(), 1e-3), store="host")
        for _ in range(3):
            step(*batch)
        times, checks = [], []
        for _ in range(arguments.steps):
            watch.seconds, begun = 0.0, time.perf_counter()
            step(*batch)
            times.append(time.perf_counter() - begun)
            checks.append(watch.seconds)
        step.close()
        ratio = statistics.median(t / (t - c) for t, c in zip(times, checks, strict=True))
        rows.append({"job": make.__name__, "step_seconds": times, "check_seconds": checks, "ratio_median": ratio})
        print(
            f"{make.__name__:10s} a step {statistics.median(times) * 1e3:.1f} ms, of it checks "
            f"{statistics.median(checks) * 1e3:.2f} ms: {ratio:.3f} of a step without them",
            flush=True,
        )
    arguments.out.write_text(json_record(torch.device("cpu"), rows=rows))


if __name__ == "__main__":
    main()
