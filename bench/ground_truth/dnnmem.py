"""The PyTorch jobs of the DNNMem paper as ordinary training loops; its measurements are in overspill_papers.papers.dnnmem_tables.

What the paper leaves open, or what its figures contradict, and what is taken here:
- InceptionV3 has no auxiliary outputs, which are less than 0.1 GiB.
- Optimizer: SGD without momentum for images and the LSTM, which with Adam's states would need more than was measured;
  AdamW for BERT, as fine-tuning on GLUE is done: without its states, 1.7 GiB of the smallest job stay unexplained.
- Loss of the LSTM: the mean of its outputs.
- BERT: a classifier of two classes (GLUE); attention and GELU spelled out in elementary operators, as its PyTorch code
  of 2019 had them. The measured memory grows by 1.2 to 1.3 GiB in 1024 tokens; with GELU as one operator it would be 0.9.
- zero_grad fills gradients with zeros and optimizers go parameter by parameter, as in PyTorch 1.2: from the second
  iteration on the gradients live through the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from overspill_papers.papers.dnnmem_tables import FRAMEWORKS, LSTM_WIDTH, P40_GB, TableRow, load

from . import torchvision_models, transformer_models
from .jobs import Started, move, nothing

__all__ = ["FRAMEWORKS", "P40_GB", "TableRow", "build", "load", "run", "train"]

ITERATIONS = 3
_LEARNING_RATE = 0.001
_CLASSES = {"BERT": 2}
_IMAGE_CLASSES = 1000


def run(row: TableRow, device: str, iterations: int = ITERATIONS, started: Started = nothing) -> None:
    """Train the PyTorch job of one row on `device`; `started` is called when an iteration starts."""
    train(row, build(row), device, iterations, started)


def build(row: TableRow) -> nn.Module:
    """Returns the model on the host, with random weights, in training mode."""
    if row.framework != "PyTorch":
        raise SystemExit(f"only the PyTorch jobs can be run, not {row.model} in {row.framework}")
    if row.model == "LSTM":
        return _Lstm().train()
    if row.model == "BERT":
        return _bert().train()
    return torchvision_models.build(row.model)


class _Lstm(nn.Module):
    """Two layers, as wide inside as their input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(LSTM_WIDTH, LSTM_WIDTH, num_layers=2)

    def forward(self, steps: Tensor) -> Tensor:
        outputs, _ = self.layers(steps)
        return outputs


class _SpelledOutLayerNorm(nn.Module):
    """Layer norm in elementary operators: pytorch-pretrained-BERT 0.6, modeling.py, where Apex is not installed."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + self.epsilon)
        return self.weight * x + self.bias


def _bert() -> nn.Module:
    library: Any = transformer_models.transformers()
    config = library.BertConfig(hidden_act="gelu_python", attn_implementation="eager", num_labels=2)
    model: nn.Module = library.BertForSequenceClassification(config)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.LayerNorm):
                setattr(module, name, _SpelledOutLayerNorm(child.normalized_shape[0], child.eps))
    return model


def train(
    row: TableRow, model: nn.Module, device: str, iterations: int = ITERATIONS, started: Started = nothing
) -> None:
    """Move a model that `build` returned to `device` and train it there."""
    move(model, device)
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if row.model == "BERT" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=_LEARNING_RATE, foreach=False)
    loss_of: Callable[..., Tensor] = _LOSSES.get(row.model, _image_loss)
    for batch in _batches(row, iterations):
        started()
        batch = tuple(tensor.to(device) for tensor in batch)  # noqa: PLW2901  # the name lets go of the host's batch
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model, *batch)
        loss.backward()
        optimizer.step()


def _image_loss(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(images), labels)


def _bert_loss(model: nn.Module, tokens: Tensor, mask: Tensor, segments: Tensor, labels: Tensor) -> Tensor:
    return model(tokens, attention_mask=mask, token_type_ids=segments, labels=labels).loss


def _lstm_loss(model: nn.Module, steps: Tensor) -> Tensor:
    return model(steps).mean()


_LOSSES: dict[str, Callable[..., Tensor]] = {"BERT": _bert_loss, "LSTM": _lstm_loss}


def _batches(row: TableRow, iterations: int) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(iterations):
        yield _batch(row)


def _batch(row: TableRow) -> tuple[Tensor, ...]:
    labels = torch.randint(_CLASSES.get(row.model, _IMAGE_CLASSES), (row.batch_size,))
    if row.image_side is not None:
        return torch.randn(row.batch_size, 3, row.image_side, row.image_side), labels
    shape = (row.batch_size, row.seq_len or 1)
    if row.model == "LSTM":
        return (torch.randn(shape[1], shape[0], LSTM_WIDTH),)
    mask, segments = torch.ones(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    return torch.randint(30522, shape), mask, segments, labels
