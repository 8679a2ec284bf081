"""The measured training jobs of `xmem.csv`, row by row, as ordinary PyTorch training loops.

`run(row, device)` builds the model on the host, moves it to `device` and trains it. It runs for real, and unchanged
under FakeTensorMode, where the largest batch costs no memory. What a name keeps alive is part of the measured job: the
model's last outputs live until the next forward has finished, an old batch until the loop gives its name to the next.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from . import torchvision_models, transformer_models

DATA = Path(__file__).parent / "xmem.csv"
ITERATIONS = 4  # the loops stop after the iteration whose index is the target, 3
_IMAGE_SIDE = 86
_LABELS = 10  # CIFAR-10, also where a network has 1000 outputs
_TOKENS = 128  # the longest line of a batch; almost surely this long from 10 lines on
_LEARNING_RATE = 0.001
_NOT_COUNTED = -100  # the label of padding

Started = Callable[[], object]

_AT_START, _BEFORE_BACKWARD, _AT_END = 0, 1, 2  # Row.zero_grad_mode


@dataclass(frozen=True)
class Row:
    """One measured job and what each tool said of it; README.md has what the columns mean."""

    family: str
    model: str
    optimizer: str
    batch_size: int
    input: str
    gpu: str
    total_gpu_memory_bytes: int
    ground_bytes: int
    real_oom: bool
    xmem_bytes: int | None
    dnnmem_bytes: int | None
    schedtune_bytes: int | None
    zero_grad_mode: int
    zero_grad_recorded: bool
    target_iteration: int
    source_path: str
    xmem_oom: bool | None
    dnnmem_oom: bool | None
    schedtune_oom: bool | None


def _integer(text: str) -> int | None:
    return None if text in {"", "null"} else int(text)


def _truth(text: str) -> bool | None:
    return None if text in {"", "null"} else text == "true"


def load(path: Path = DATA) -> tuple[Row, ...]:
    """Returns the rows of a file, in its order; a zero_grad mode that was not recorded is read as 0."""
    with path.open(newline="") as file:
        return tuple(_row(line) for line in csv.DictReader(file))


def _row(line: dict[str, str]) -> Row:
    mode = _integer(line["zero_grad_mode"])
    return Row(
        family=line["family"],
        model=line["model"],
        optimizer=line["optimizer"],
        batch_size=int(line["batch_size"]),
        input=line["input"],
        gpu=line["gpu"],
        total_gpu_memory_bytes=int(line["total_gpu_memory_bytes"]),
        ground_bytes=int(line["ground_bytes"]),
        real_oom=line["real_oom"] == "true",
        xmem_bytes=_integer(line["xmem_bytes"]),
        dnnmem_bytes=_integer(line["dnnmem_bytes"]),
        schedtune_bytes=_integer(line["schedtune_bytes"]),
        zero_grad_mode=mode or 0,
        zero_grad_recorded=mode is not None,
        target_iteration=int(line["target_iteration"]),
        source_path=line["source_path"],
        xmem_oom=_truth(line["xmem_oom"]),
        dnnmem_oom=_truth(line["dnnmem_oom"]),
        schedtune_oom=_truth(line["schedtune_oom"]),
    )


def nothing() -> None:
    """What is called where no one asks when an iteration starts."""


def run(row: Row, device: str, iterations: int = ITERATIONS, started: Started = nothing) -> None:
    """Train the job of one row on `device`; `started` is called when an iteration starts."""
    with surroundings(row):
        train(row, build(row), device, iterations, started)


def surroundings(row: Row) -> AbstractContextManager[None]:
    """Returns the context in which the job of `row` runs also under FakeTensorMode."""
    return nullcontext() if row.family == "CNN" else transformer_models.lines_of_unequal_length()


def build(row: Row) -> nn.Module:
    """Returns the model on the host, with random weights, in training mode."""
    return (torchvision_models if row.family == "CNN" else transformer_models).build(row.model)


def train(row: Row, model: nn.Module, device: str, iterations: int = ITERATIONS, started: Started = nothing) -> None:
    """Move a model that `build` returned to `device` and train it there: the part that was measured."""
    (_train_images if row.family == "CNN" else _train_text)(row, model, device, iterations, started)


def _optimizer(row: Row, model: nn.Module) -> torch.optim.Optimizer:
    kind: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, row.optimizer)
    if row.optimizer == "Adafactor":
        kind = transformer_models.adafactor
    return kind(params=model.parameters(), lr=_LEARNING_RATE)


def move(model: nn.Module, device: str) -> None:
    """Move a model to `device`, unless it is there."""
    if next(model.parameters()).device != torch.device(device):  # a move to where it is would fail with fake tensors
        model.to(device)


def _train_images(row: Row, model: nn.Module, device: str, iterations: int, started: Started) -> None:
    move(model, device)
    model.train()
    optimizer = _optimizer(row, model)
    criterion = nn.CrossEntropyLoss()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    for inputs, labels in _images(row.batch_size, iterations):
        started()
        if row.zero_grad_mode == _AT_START:
            optimizer.zero_grad()
        inputs, labels = inputs.to(device), labels.to(device)  # noqa: PLW2901  # the names let go of the host's batch
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        if row.zero_grad_mode == _BEFORE_BACKWARD:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        _, _predictions = torch.max(outputs, 1)  # kept until the next ones, as in the measured job
        if row.zero_grad_mode == _AT_END:
            optimizer.zero_grad()
        scheduler.step()


def _train_text(row: Row, model: nn.Module, device: str, iterations: int, started: Started) -> None:
    optimizer = _optimizer(row, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.1)
    move(model, device)
    vocabulary = model.config.vocab_size
    for batch in _texts(row.batch_size, vocabulary, iterations):
        started()
        if row.zero_grad_mode == _AT_START:
            optimizer.zero_grad()
        batch = {name: tensor.to(device) for name, tensor in batch.items()}  # noqa: PLW2901  # as for images
        outputs = model(**batch)
        if row.zero_grad_mode == _BEFORE_BACKWARD:
            optimizer.zero_grad()
        loss = outputs.loss
        loss.backward()
        optimizer.step()
        if row.zero_grad_mode == _AT_END:
            optimizer.zero_grad()
        scheduler.step()


def _images(batch_size: int, iterations: int) -> Iterator[tuple[Tensor, Tensor]]:
    shape = (batch_size, 3, _IMAGE_SIDE, _IMAGE_SIDE)
    for _ in range(iterations):
        yield torch.randn(shape), torch.randint(_LABELS, (batch_size,))


def _texts(batch_size: int, vocabulary: int, iterations: int) -> Iterator[dict[str, Tensor]]:
    for _ in range(iterations):
        yield _text(batch_size, vocabulary)


def _text(batch_size: int, vocabulary: int) -> dict[str, Tensor]:
    """Returns lines of random lengths, padded to the longest, whose labels are the lines themselves."""
    lengths = torch.randint(1, _TOKENS + 1, (batch_size, 1))
    lengths[0] = _TOKENS
    real = torch.arange(_TOKENS) < lengths
    tokens = torch.randint(vocabulary, (batch_size, _TOKENS))
    labels = tokens.masked_fill(~real, _NOT_COUNTED)
    return {"input_ids": tokens, "attention_mask": real.long(), "labels": labels}
