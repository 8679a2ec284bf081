"""The measurements of the DNNMem paper, and its PyTorch jobs as ordinary training loops.

Gao et al., "Estimating GPU Memory Consumption of Deep Learning Models", ESEC/FSE 2020: Figure 1, Tables 6 and 7, and the
out-of-memory experiments of section 5.2. PyTorch 1.2.0, TensorFlow 1.12.0, MXNet 1.5.0, CUDA 9.0, cuDNN 7.0.3, Tesla
P40; real use is read with NVML and so has the CUDA context in it. The figures are printed as GB; the P40 is given as
22.38 GB, which are 22 919 MiB, so GB is GiB.

What the paper leaves open, or what its figures contradict, and what is taken here:
- InceptionV3 reads 299x299, the size it is made for. The text says 224x224; but then all that training keeps is 6.3 GiB,
  against 15.6 measured, and 12.0 with 299x299. Without auxiliary outputs, which are less than 0.1 GiB.
- Optimizer: SGD without momentum for images and the LSTM, which with Adam's states would need more than was measured;
  AdamW for BERT, as fine-tuning on GLUE is done: without its states, 1.7 GiB of the smallest job stay unexplained.
- Length of the LSTM's sequences: 100. Weights, input and both layers' outputs then are 2.3 GiB, as Shape Inference says.
- Loss of the LSTM: the mean of its outputs.
- BERT: a classifier of two classes (GLUE); attention and GELU spelled out in elementary operators, as its PyTorch code
  of 2019 had them. The measured memory grows by 1.2 to 1.3 GiB in 1024 tokens; with GELU as one operator it would be 0.9.
- zero_grad fills gradients with zeros and optimizers go parameter by parameter, as in PyTorch 1.2: from the second
  iteration on the gradients live through the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import torchvision_models, transformer_models
from .jobs import Started, move, nothing

P40_GB = 22.38
ITERATIONS = 3
_LEARNING_RATE = 0.001
_LSTM_WIDTH = 5120
_LSTM_STEPS = 100
_CLASSES = {"BERT": 2}
_IMAGE_CLASSES = 1000


@dataclass(frozen=True)
class Row:
    """One experiment: GB as printed; None where the paper has no figure."""

    source: str  # where in the paper
    framework: str
    model: str
    batch_size: int
    seq_len: int | None
    image_side: int | None
    real_gb: float | None
    estimated_gb: float | None
    shape_inference_gb: float | None
    real_oom: bool = False

    @property
    def real_bytes(self) -> int | None:
        """What was measured, in bytes, to the 0.1 GiB that is printed."""
        return None if self.real_gb is None else round(self.real_gb * 2**30)


FRAMEWORKS = ("TensorFlow", "PyTorch", "MXNet")
_Figures = tuple[float, float, float]  # real, estimated, shape inference

# Model, then one triple for each framework.
_TABLE_6: tuple[tuple[str, tuple[_Figures, _Figures, _Figures]], ...] = (
    ("VGG16", ((17.4, 16.9, 7.2), (16.2, 14.6, 7.2), (14.3, 14.2, 7.2))),
    ("ResNet50", ((8.4, 8.2, 5.1), (13.2, 10.9, 10.1), (11.8, 11.5, 10.1))),
    ("InceptionV3", ((10.1, 8.7, 7.0), (15.6, 12.0, 11.2), (12.9, 11.6, 11.2))),
    ("LSTM", ((4.1, 4.3, 2.3), (7.9, 8.5, 2.3), (11.9, 12.2, 2.3))),
)
# Batch size and sequence length of BERT, then one triple for each framework.
_TABLE_7: tuple[tuple[int, int, tuple[_Figures, _Figures, _Figures]], ...] = (
    (32, 32, ((4.2, 3.4, 1.8), (3.5, 2.4, 1.8), (3.7, 2.9, 1.8))),
    (32, 64, ((8.2, 5.4, 3.1), (4.7, 3.8, 3.1), (4.9, 4.3, 3.1))),
    (128, 64, ((16.2, 15.4, 11.2), (12.7, 12.3, 11.2), (11.9, 13.1, 11.2))),
    (64, 128, ((16.2, 15.4, 11.2), (12.6, 12.3, 11.2), (13.1, 13.1, 11.2))),
    (100, 128, ((21.2, 22.7, 17.3), (18.4, 18.6, 17.3), (20.5, 19.6, 17.3))),
)
_IMAGE_SIDES = {"VGG16": 224, "ResNet50": 224, "InceptionV3": 299}
_LENGTHS = {"LSTM": _LSTM_STEPS}


def load(framework: str = "PyTorch") -> tuple[Row, ...]:
    """Returns the experiments with one framework: TensorFlow, PyTorch or MXNet."""
    column = FRAMEWORKS.index(framework)
    rows = [
        Row("Table 6", framework, model, 128, _LENGTHS.get(model), _IMAGE_SIDES.get(model), *figures[column])
        for model, figures in _TABLE_6
    ]
    rows += [
        Row("Table 7", framework, "BERT", size, length, None, *figures[column]) for size, length, figures in _TABLE_7
    ]
    for model, side in _IMAGE_SIDES.items():  # all ran out of memory, but for TensorFlow's ResNet50
        oom = (framework, model) != ("TensorFlow", "ResNet50")
        rows.append(Row("Section 5.2", framework, model, 512, None, side, None, None, None, oom))
    if framework == "PyTorch":
        rows.append(Row("Figure 1", framework, "ResNet50", 256, None, _IMAGE_SIDES["ResNet50"], 22.0, None, None))
    return tuple(rows)


def run(row: Row, device: str, iterations: int = ITERATIONS, started: Started = nothing) -> None:
    """Train the PyTorch job of one row on `device`; `started` is called when an iteration starts."""
    train(row, build(row), device, iterations, started)


def build(row: Row) -> nn.Module:
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
        self.layers = nn.LSTM(_LSTM_WIDTH, _LSTM_WIDTH, num_layers=2)

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


def train(row: Row, model: nn.Module, device: str, iterations: int = ITERATIONS, started: Started = nothing) -> None:
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


def _batches(row: Row, iterations: int) -> Iterator[tuple[Tensor, ...]]:
    for _ in range(iterations):
        yield _batch(row)


def _batch(row: Row) -> tuple[Tensor, ...]:
    labels = torch.randint(_CLASSES.get(row.model, _IMAGE_CLASSES), (row.batch_size,))
    if row.image_side is not None:
        return torch.randn(row.batch_size, 3, row.image_side, row.image_side), labels
    shape = (row.batch_size, row.seq_len or 1)
    if row.model == "LSTM":
        return (torch.randn(shape[1], shape[0], _LSTM_WIDTH),)
    mask, segments = torch.ones(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    return torch.randint(30522, shape), mask, segments, labels
