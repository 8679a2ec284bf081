"""No field of a Job is ignored: each command's recording or graph changes by it, or it is refused by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from overspill.capture.virtual_gpu.record import record
from overspill.cli import group
from overspill.cli.job import job_of
from overspill.core.errors import RequestError
from overspill.estimation.api import estimate
from overspill.estimation.programs import program_of
from overspill.job import Job, NamedModel, Parallel
from overspill.job.ways import ways_of
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.runtime.training import train

ROOT = Path(__file__).parents[2]
TEXT = NamedModel("decoder:width=64,depth=1,heads=4,vocabulary=64,seq_len=32")
DEEPER = NamedModel("decoder:width=64,depth=2,heads=4,vocabulary=64,seq_len=32")
CAUSAL = NamedModel(
    "hf:llama,hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32,vocab_size=64", seq_len=8
)
IMAGES = NamedModel("vgg11", small=True)
CHANGED: dict[str, dict[str, Any]] = {
    "model": {"model": IMAGES},
    "batch": {"batch": 3},
    "optimizer": {"optimizer": "adamw8bit"},
    "dtype": {"dtype": "amp-bfloat16"},
    "accumulate": {"accumulate": 2},
    "clip_norm": {"clip_norm": 1.0},
    "clip_value": {"clip_value": 0.1},
    "set_to_none": {"set_to_none": False},
    "parallel": {"parallel": Parallel("ddp", 2)},
    "checkpointing": {"model": DEEPER, "checkpointing": True},
    "reentrant": {"model": DEEPER, "checkpointing": True, "reentrant": True},
    "attention": {"attention": "math"},
    "channels_last": {"model": IMAGES, "channels_last": True},
    "lora": {"lora": 4},
    "lora_targets": {"lora": 4, "lora_targets": "qkv"},
    "lora_dropout": {"lora": 4, "lora_dropout": 0.1},
    "quantize": {"lora": 4, "quantize": "4bit"},
    "upcast": {"lora": 4, "quantize": "4bit", "dtype": "bfloat16", "upcast": False},
    "shift_logits": {"model": CAUSAL, "shift_logits": True},
    "loss_chunks": {"model": CAUSAL, "loss_chunks": 4},
    "objective": {"model": CAUSAL, "objective": "dpo"},
    "keep_outputs": {"keep_outputs": True},
    "offload_optimizer": {"offload_optimizer": True},
    "cudnn_benchmark": {"model": IMAGES, "cudnn_benchmark": True},
    "generate": {"generate": 4},
}


def recorded(job: Job) -> Any:
    return record(program_of(job))


def planned(job: Job, device: str = "t4", *, whole_step: bool = False, backend: str = "eager") -> Any:
    return step_of(job, Options(device=device, whole_step=whole_step, backend=backend)).graph


def trained(job: Job) -> Any:
    """The losses of two steps, and the peak of the plan."""
    run = train(job, Options(store="host", policy="liveness"), steps=2)
    return run.losses, run.planned_peak_bytes, run.plan and run.plan.graph


COMMANDS: dict[str, Callable[[Job], Any]] = {"estimate": recorded, "plan": planned}
SLOW: dict[str, Callable[[Job], Any]] = {
    "plan --whole-step": lambda job: planned(job, whole_step=True),
    "train": trained,
    "plan --backend inductor": lambda job: planned(job, backend="inductor"),
    "plan --whole-step --backend inductor": lambda job: planned(job, whole_step=True, backend="inductor"),
}


OTHERWISE = {("attention", command): {"attention": "flash"} for command in SLOW if command != "plan --whole-step"}
"""On a CPU, where Inductor's programs are made, math is the kernel of a model with dropout anyway."""

GOES_WITH = {"upcast": "quantize"}

ALIKE = {"lora_targets", "lora_dropout", "shift_logits", "upcast", "quantize", "attention"}
"""What every command has from the same `prepare` as other fields."""

PREPARED = {"model", "checkpointing", "reentrant", "lora", "loss_chunks", "objective", "dtype"}
"""What `prepare` makes of the model; that `plan` takes such a model is seen by `channels_last`."""


@cache
def of(command: str, changes: tuple[tuple[str, Any], ...]) -> Any:
    return (COMMANDS | SLOW)[command](replace(Job(TEXT, 2, "adamw"), **dict(changes)))


def test_every_field_has_an_example_and_an_argument() -> None:
    assert CHANGED.keys() == {field.name for field in fields(Job)}
    assert CHANGED.keys() - {"model"} <= inspect.signature(estimate).parameters.keys()


def test_every_way_to_train_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "estimates.md").read_text(encoding="utf-8")
    assert [name for name in ways_of(Job) if f"--{name.replace('_', '-')}" not in text.replace("--no-", "--")] == []


CASES = [
    pytest.param(field, command, marks=pytest.mark.long)
    if field in ALIKE or command in SLOW or (command == "plan" and field in PREPARED)
    else (field, command)
    for field in CHANGED
    for command in COMMANDS | SLOW
]


@pytest.mark.parametrize(("field", "command"), CASES)
def test_a_field_changes_what_a_command_sees_or_is_refused_by_name(field: str, command: str) -> None:
    changes = OTHERWISE.get((field, command), CHANGED[field])
    plain = tuple((name, value) for name, value in changes.items() if name != field)
    try:
        found = of(command, tuple(changes.items()))
    except RequestError as error:
        # A refusal of the field, or of the one without which it means nothing, is one of two right answers.
        assert {field, GOES_WITH.get(field, field)} & {*error.fields}  # noqa: PT017
        return
    assert found != of(command, plain)


@pytest.mark.parametrize("command", ["estimate", "advise", "plan", "compare", "sweep", "train"])
def test_every_command_takes_every_option_of_a_job(command: str) -> None:
    commands = group().commands
    assert inspect.signature(job_of).parameters.keys() <= {parameter.name for parameter in commands[command].params}
