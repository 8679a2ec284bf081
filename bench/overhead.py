"""What parts of a run cost on the CPU: steps with one of them over the same steps without, in turns in one process.

    python bench/overhead.py checksum|recording|guards|swap|estimate [--models resnet18,gpt2] [--rounds 7] [--small] [--out FILE]

`checksum`: of stored bytes, in `train_step` under 60 % of what the step needs. `recording`: of a run, by each way in; the first
recorded step, in which graphs are made to tell what they do, does not count, but what that took is told. `guards`: what
`train_step` looks at before each step, timed where it is called; for GPT-2 with 128 tokens, a perceptron of ten layers and a padded
BERT of two narrow ones, which asks its mask. `swap`: how long the thread that computes is busy with starting and awaiting an
offload and a prefetch of a small tensor, beside the smallest op, an addition of 16 numbers. `estimate`: the CPU seconds of fresh
`overspill estimate` commands, the least of the rounds, beside those of `import torch` alone.

On one thread. CPU seconds are of all threads. `--small` takes the models' small configurations. Prints one line a case, and writes
all figures where `--out` says. Two to eight minutes.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paired import json_record
from torch import Tensor, nn

import overspill
from overspill.capture.compiled.guards import Guards
from overspill.core.units import format_bytes, format_seconds
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.runtime.calibrate import transfer_host_seconds
from overspill.runtime.step.python_state import PythonState
from overspill.runtime.step.state import StepState
from overspill.runtime.transfer.engine import make_engine
from overspill.runtime.transfer.registry import make_store

BATCHES = {"resnet18": 8, "vgg11": 4, "gpt2": 4}
WARM_UP = 2
"""Steps that do not count: they plan and compile, and touch the store first."""
CHECKS = (
    (Guards, "difference"),
    (PythonState, "changed"),
    (StepState, "check_model"),
    (StepState, "adopt_parameters"),
    (StepState, "adopt_optimizer"),
)
ESTIMATES = {
    "resnet50": "resnet50 --batch 32",
    "1.3 B decoder": "decoder:width=2048,heads=16,depth=24 --batch 1 --optimizer adamw",
    "64 B decoder, one GPU": "decoder:width=8192,heads=64,depth=80 --batch 1 --optimizer adamw",
    "175 B decoder, FSDP": "decoder:width=12288,heads=96,depth=96 --batch 1 --optimizer adamw --parallel fsdp --gpus 64",
}
ADDITIONS, ROUNDS_OF_SWAPS = 2000, 9

Row = dict[str, Any]


class Seconds(NamedTuple):
    """How long something took, on the clock and on all cores."""

    wall: float
    cpu: float


def timed(action: Callable[[], Any]) -> Seconds:
    """What one `action` takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return Seconds(time.perf_counter() - wall, time.process_time() - cpu)


def over(plain: list[Seconds], more: list[Seconds]) -> Row:
    """The figures of steps in turn: those with more, over those without."""
    cpu = [b.cpu / a.cpu for a, b in zip(plain, more, strict=True)]
    wall = [b.wall / a.wall for a, b in zip(plain, more, strict=True)]
    return {
        "plain_cpu_seconds": [s.cpu for s in plain], "cpu_seconds": [s.cpu for s in more],
        "cpu_ratio_median": statistics.median(cpu), "cpu_ratio_min": min(cpu), "cpu_ratio_max": max(cpu),
        "wall_ratio_median": statistics.median(wall),
    }  # fmt: skip


def said(row: Row) -> str:
    """The ratios of `row`."""
    return (
        f"CPU time x {row['cpu_ratio_median']:.3f} ({row['cpu_ratio_min']:.3f} to {row['cpu_ratio_max']:.3f}), "
        f"time x {row['wall_ratio_median']:.3f}"
    )


def whole_step(model: str, asked: argparse.Namespace, **how: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """A `train_step` of a built-in model, and a batch."""
    torch.manual_seed(0)
    job = load(model, small=asked.small)
    optimizer = optimizer_named("adamw")(job.module.parameters())
    return overspill.train_step(job.module, job.loss, optimizer, **how), job.make_batch(BATCHES[model])


def checksum(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Whole steps that check what comes back from the store."""
    for model in asked.models.split(","):
        for store in ("host", "disk"):
            how: Row = {"budget": "60%", "policy": "window", "store": store}
            sides = [whole_step(model, asked, checksum=checks, **how) for checks in (False, True)]
            taken: list[list[Seconds]] = [[], []]
            losses: list[list[float]] = [[], []]
            for index in range(1 + asked.rounds):
                for side, (step, batch) in enumerate(sides):
                    torch.manual_seed(index)  # for dropout
                    seconds = timed(lambda s=step, b=batch, found=losses[side]: found.append(s(*b).item()))  # type: ignore[misc]
                    taken[side] += [seconds] if index else []
            (plan,) = sides[0][0].plans
            for step, _ in sides:
                step.close()
            row = {"model": model, "store": store, "moved_bytes": plan.offloaded_bytes + plan.prefetched_bytes}
            row |= over(*taken) | {"losses_identical": losses[0] == losses[1]}
            yield (
                (
                    f"{model:9s} {store:5s} moves {format_bytes(row['moved_bytes'])} a step: {said(row)}, "
                    f"identical {row['losses_identical']}"
                ),
                row,
            )


def recording(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Steps that are recorded."""
    for model in asked.models.split(","):
        for way in ("compile", "inductor", "train_step"):
            source, step = _recorded_job(model, way, asked)
            plain, recorded, prepared = [], [], []
            for _ in range(WARM_UP):
                step()
            for _ in range(asked.rounds):
                plain.append(timed(step))
                with overspill.record(source) as seen:
                    step()
                    recorded.append(timed(step))
                prepared.append(seen.record.facts[0].prepared_seconds)
            instructions = len(seen.record.within(seen.record.compute, 1))
            source.close()
            torch._dynamo.reset()
            row = {"model": model, "way": way, "instructions": instructions} | over(plain, recorded)
            row["prepared_seconds"] = statistics.median(prepared)
            each = (min(s.cpu for s in recorded) - min(s.cpu for s in plain)) / instructions
            yield (
                (
                    f"{model:9s} {way:10s} {instructions} instructions: {said(row)}, {format_seconds(each)} for each, "
                    f"made ready in {format_seconds(row['prepared_seconds'])}"
                ),
                row,
            )


def _recorded_job(model: str, way: str, asked: argparse.Namespace) -> tuple[Any, Callable[[], Any]]:
    """What is recorded, and what takes a step."""
    how: Row = {"budget": "80%", "store": "host"}
    if way == "train_step":
        whole, batch = whole_step(model, asked, **how)
        return whole, lambda: whole(*batch)
    torch.manual_seed(0)
    job = load(model, small=asked.small)
    batch, module = job.make_batch(BATCHES[model]), TrainingStep(job)
    optimizer = optimizer_named("adamw")(module.parameters())
    compiled = overspill.compile(module, backend="inductor" if way == "inductor" else "eager", fullgraph=True, **how)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        compiled(*batch).backward()
        optimizer.step()

    return compiled.overspill, step


def guards(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """What is looked at before each whole step."""
    spent = [0.0]
    for owner, name in CHECKS:
        setattr(owner, name, _adding(getattr(owner, name), spent))
    for make in (_gpt2, _perceptron, _padded):
        torch.manual_seed(0)
        model, batch = make()
        times, checks = [], []
        with closing(
            overspill.train_step(model, None, torch.optim.SGD(model.parameters(), 1e-3), store="host")
        ) as step:
            for index in range(WARM_UP + 1 + 3 * asked.rounds):
                spent[0] = 0.0
                seconds = timed(lambda s=step, b=batch: s(*b)).wall  # type: ignore[misc]
                if index > WARM_UP:
                    times.append(seconds)
                    checks.append(spent[0])
        ratio = statistics.median(t / (t - c) for t, c in zip(times, checks, strict=True))
        name = make.__name__.strip("_")
        yield (
            (
                f"{name:10s} a step {statistics.median(times) * 1e3:.1f} ms, of it checks "
                f"{statistics.median(checks) * 1e3:.2f} ms: {ratio:.3f} of a step without them"
            ),
            {"job": name, "step_seconds": times, "check_seconds": checks, "ratio_median": ratio},
        )


def _adding(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`method`, which adds the seconds that it takes to what was `spent`."""

    def run(*args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return method(*args)
        finally:
            spent[0] += time.perf_counter() - begun

    return run


def _gpt2() -> tuple[nn.Module, tuple[Tensor, ...]]:
    job = load("gpt2", seq_len=128)
    return TrainingStep(job), job.make_batch(1)


def _perceptron() -> tuple[nn.Module, tuple[Tensor, ...]]:
    layers = nn.Sequential(*(m for _ in range(10) for m in (nn.Linear(256, 256), nn.ReLU())))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    return Net(), (torch.randn(128, 256),)


def _padded() -> tuple[nn.Module, tuple[Tensor, ...]]:
    from transformers import BertConfig, BertForMaskedLM  # noqa: PLC0415 - of this case alone

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = BertForMaskedLM(BertConfig(vocab_size=128, **sizes))

        def forward(self, words: Tensor, mask: Tensor) -> Tensor:
            return self.bert(input_ids=words, attention_mask=mask, labels=words).loss

    return Net(), (torch.randint(5, 128, (4, 32)), (torch.arange(32) < torch.tensor([[20], [32], [25], [32]])).long())


def swap(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """An offload and a prefetch of 16 KiB."""
    device = torch.device(asked.device)
    with torch.no_grad(), closing(make_engine(make_store("host", device), device)) as engine:
        engine.store.reserve(16 << 20)
        numbers, add = torch.ones(16, device=device), torch.ops.aten.add.Tensor
        addition = min(_busy_seconds(lambda: add(numbers, numbers)) for _ in range(ROUNDS_OF_SWAPS))
        seconds = 2 * transfer_host_seconds(engine, torch.zeros(16 << 10, dtype=torch.uint8, device=device))
    yield (
        f"{asked.device}: an addition {addition * 1e6:.1f} µs, a swap {seconds * 1e6:.1f} µs or {seconds / addition:.1f} additions",
        {"addition_seconds": addition, "swap_seconds": seconds},
    )


def _busy_seconds(action: Callable[[], Any]) -> float:
    """Seconds that this thread is busy with one `action`."""
    begun = time.thread_time()
    for _ in range(ADDITIONS):
        action()
    return (time.thread_time() - begun) / ADDITIONS


def estimate(asked: argparse.Namespace) -> Iterator[tuple[str, Row]]:
    """Fresh commands."""
    commands = {"import torch": [sys.executable, "-c", "import torch"]}
    commands |= {name: [sys.executable, "-m", "overspill", "estimate", *job.split()] for name, job in ESTIMATES.items()}
    for name, command in commands.items():
        taken = []
        for _ in range(asked.rounds):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            taken.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
        row = {"job": name, "cpu_seconds": round(min(taken), 2)}
        yield f"{name:24} {row['cpu_seconds']:6.2f} CPU s", row


SUBJECTS = {"checksum": checksum, "recording": recording, "guards": guards, "swap": swap, "estimate": estimate}


def main() -> None:
    """Run the cases of one subject and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("--models", default="resnet18,gpt2", help=f"of {', '.join(BATCHES)}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu", help="for swaps")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for line, row in SUBJECTS[asked.subject](asked):
        rows.append(row)
        print(line, flush=True)
        if asked.out is not None:
            asked.out.write_text(json_record(torch.device(asked.device), small=asked.small, rows=rows))


if __name__ == "__main__":
    main()
