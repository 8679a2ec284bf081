"""DNNMem's PyTorch jobs, as its versions ran them.

The loop of PyTorch 1.2, its LSTM, and BERT as pytorch-pretrained-BERT 0.6 spelled it out. Gradients are filled with
zeros, so that from the second step on they live through forward, and the optimizer goes parameter by parameter.
Attention, GELU and layer norm (`modeling.py`, where Apex is not installed) are elementary operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill import models
from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record as run_on_virtual_gpu
from overspill.costs import capability_of
from overspill.devices import load_device

from .dnnmem_tables import IMAGE_SIDES, LSTM_STEPS, LSTM_WIDTH

ITERATIONS = 3
_BUILT_IN = {"VGG16": "vgg16", "ResNet50": "resnet50", "InceptionV3": "inception-v3"}
_LEARNING_RATE = 0.001
_Job = tuple[nn.Module, Callable[[], tuple[Tensor, ...]], Callable[..., Tensor]]


def record(model: str, batch: int, length: int | None) -> Recording:
    """Return the recording of some steps of a network of the paper on a P40.

    `length` is that of BERT's lines.
    """

    def program(recorder: Recorder) -> None:
        module, make_batch, loss = _job(model, batch, length)
        module = module.to("cuda").train()
        recorder.mark_module(module)
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW if model == "BERT" else torch.optim.SGD
        optimizer = kind(module.parameters(), lr=_LEARNING_RATE, foreach=False)
        for _ in range(ITERATIONS):
            recorder.start_iteration()
            inputs = tuple(tensor.to("cuda") for tensor in make_batch())
            optimizer.zero_grad(set_to_none=False)
            value = loss(module, *inputs)
            value.backward()
            optimizer.step()

    return run_on_virtual_gpu(program, capability=capability_of(load_device("p40").compute_capability))


def _job(model: str, batch: int, length: int | None) -> _Job:
    if model in _BUILT_IN:
        job = models.load(_BUILT_IN[model], image_size=IMAGE_SIDES[model])
        for layer in job.module.modules():
            if isinstance(layer, nn.ReLU):
                layer.inplace = True  # as torchvision's networks have it
        return job.module, lambda: job.make_batch(batch), job.loss
    # The LSTM has no loss of its own, and BERT reads lines of text.
    if model == "LSTM":
        shape = (LSTM_STEPS, batch, LSTM_WIDTH)
        module = nn.LSTM(LSTM_WIDTH, LSTM_WIDTH, num_layers=2)
        return module, lambda: (torch.randn(shape, device="cpu"),), lambda net, steps: net(steps)[0].mean()
    size = (batch, length or 1)

    def lines() -> tuple[Tensor, ...]:
        mask, segments = (torch.ones(size, dtype=torch.long, device="cpu") for _ in range(2))
        return (
            torch.randint(30522, size, device="cpu"), segments, mask,
            torch.randint(2, (batch,), device="cpu"),
        )  # fmt: skip

    return Bert(), lines, lambda net, *inputs: F.cross_entropy(net(*inputs[:-1]), inputs[-1])


class _LayerNorm(nn.Module):
    """Layer norm in elementary operators."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        x = (x - mean) / torch.sqrt(variance + 1e-12)
        return self.weight * x + self.bias


class _Layer(nn.Module):
    """One layer of the encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.after_attention, self.after_up = _LayerNorm(width), _LayerNorm(width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        query, key, value = (
            part(x).view(*x.shape[:2], self.heads, -1).permute(0, 2, 1, 3)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(query.shape[-1])
        weights = self.dropout(torch.softmax(scores + mask, -1))
        context = torch.matmul(weights, value).permute(0, 2, 1, 3).contiguous().view(x.shape)
        x = self.after_attention(self.dropout(self.out(context)) + x)
        hidden = self.up(x)
        hidden = hidden * 0.5 * (1.0 + torch.erf(hidden / math.sqrt(2.0)))
        return self.after_up(self.dropout(self.down(hidden)) + x)


class Bert(nn.Module):
    """BERT (base, uncased) with a classifier of two classes."""

    def __init__(self, layers: int = 12, width: int = 768, heads: int = 12, words: int = 30522) -> None:
        super().__init__()
        self.words, self.positions, self.segments = (nn.Embedding(rows, width) for rows in (words, 512, 2))
        self.norm, self.dropout = _LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(_Layer(width, heads) for _ in range(layers))
        self.pooler, self.classifier = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids: Tensor, segments: Tensor, mask: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device).unsqueeze(0).expand_as(ids)
        x = self.dropout(self.norm(self.words(ids) + self.positions(positions) + self.segments(segments)))
        hidden = (1.0 - mask[:, None, None, :].to(x.dtype)) * -10000.0
        for layer in self.layers:
            x = layer(x, hidden)
        return self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
