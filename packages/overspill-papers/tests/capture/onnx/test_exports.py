"""Models as torch.onnx exports them; skipped without the package. Every value's shape is that of ONNX's own inference."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import interpolate, relu

from overspill.devices import load_device
from overspill_papers.capture.mxnet.backward import training_step
from overspill_papers.capture.mxnet.executor import record
from overspill_papers.capture.mxnet.symbol import NodeOutput
from overspill_papers.capture.onnx import reader

onnx: Any = pytest.importorskip("onnx")
P40 = load_device("p40")
IDS, IMAGES, STEPS = torch.ones(2, 16, dtype=torch.long), torch.ones(2, 3, 32, 32), torch.ones(2, 9, 12)
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


class UNet(nn.Module):
    """Two levels; the lower one is brought back up in one of four ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.down, self.low, self.out = (nn.Conv2d(*c, 3, padding=1) for c in ((3, 8), (8, 16), (24, 4)))
        self.up, self.way = nn.ConvTranspose2d(16, 16, 2, 2) if way == "transposed" else None, way

    def forward(self, x: Tensor) -> Tensor:
        skip = relu(self.down(x))
        low = relu(self.low(nn.functional.max_pool2d(skip, 2)))
        if self.up is not None:
            low = self.up(low)
        elif self.way == "to a size":
            low = interpolate(low, size=skip.shape[2:], mode="bilinear")
        else:
            low = interpolate(low, scale_factor=2, mode=self.way)
        return self.out(torch.cat([skip, low], 1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], *, bidirectional: bool = False) -> None:
        super().__init__()
        self.layers = kind(12, 16, num_layers=2, batch_first=True, bidirectional=bidirectional)
        self.out = nn.Linear(32 if bidirectional else 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0])


class First(nn.Module):
    """The first output of one of transformers' models."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)[0]


def bert() -> nn.Module:
    return First(transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=99, **SMALL)))


def segformer() -> nn.Module:
    config = transformers.SegformerConfig(hidden_sizes=[8, 16, 16, 32], depths=[1] * 4, num_attention_heads=[1, 2, 2, 4],
                                          decoder_hidden_size=16)  # fmt: skip
    return First(transformers.SegformerForSemanticSegmentation(config))


def vit() -> nn.Module:
    return First(transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=8, **SMALL)))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    return First(transformers.T5EncoderModel(config))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return First(transformers.GPT2LMHeadModel(config))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, use_cache=False, **SMALL)
    return First(transformers.LlamaForCausalLM(config))


def layer() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 4, 64, batch_first=True)


# By name: the module, its input, and numbers that the file has beside its parameters: a tied head that is stored again,
# sines of positions; less of them if a batch norm is folded into its convolution.
Exported = tuple[Callable[[], nn.Module], Tensor, int]
TRACED: dict[str, Exported] = {
    "LSTM": (lambda: Recurrent(nn.LSTM), STEPS, 0),
    "LSTM, both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), STEPS, 0),
    "GRU": (lambda: Recurrent(nn.GRU), STEPS, 0),
    "RNN": (lambda: Recurrent(nn.RNN), STEPS, 0),
    **{f"U-Net, {way}": (lambda way=way: UNet(way), IMAGES, 0)
       for way in ("nearest", "bilinear", "to a size", "transposed")},
    "BERT": (bert, IDS, 0),
    "ViT": (vit, IMAGES, 0),
    "T5's encoder": (t5, IDS, 0),
    "SegFormer": (segformer, IMAGES, -16),
}  # fmt: skip
EXPORTED: dict[str, Exported] = {
    "TransformerEncoderLayer": (layer, STEPS, 0),
    "LSTM": (lambda: Recurrent(nn.LSTM), STEPS, 0),
    "U-Net": (lambda: UNet("bilinear"), IMAGES, 0),
    "GPT-2": (gpt2, IDS, 99 * 32),
    "Llama": (llama, IDS, 2 * 16 * 8),
}


def export(path: Path, build: Callable[[], nn.Module], x: Tensor, *, dynamo: bool) -> nn.Module:
    module = build().eval()
    for weight in module.parameters():
        nn.init.normal_(weight)  # equal ones would share an initializer
    batch: dict[str, Any] = {"dynamic_axes": {"x": {0: "batch"}}}
    if dynamo:
        batch = {"dynamic_shapes": ({0: torch.export.Dim("batch")},)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (x,), str(path), input_names=["x"], dynamo=dynamo, external_data=False, verbose=False, **batch
        )
    return module


def check(path: Path, module: nn.Module, beside: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[reader.SymbolNodes] = []

    class Watched(reader.SymbolNodes):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            read.append(self)

    monkeypatch.setattr(reader, "SymbolNodes", Watched)
    symbol, inputs = reader.read(path, 4, {}, trains=True)
    inputs |= {reader.LABEL: (4,)} if reader.LABEL in symbol.variables else {}
    count = sum(weight.numel() for weight in module.parameters())
    recording = record(symbol, inputs, P40)
    # A parameter of one number may be a setting in the file, and a setting a parameter.
    assert abs(recording.parameters - count - beside) <= 2
    # MXNet's rules make of each value the shape that ONNX's say.
    step = training_step(symbol, inputs)
    where = {node.name: i for i, node in enumerate(step.nodes[: step.forward_count])}
    compared = 0
    for value, entry in read[0].place.items():
        made = NodeOutput(where.get(symbol.nodes[entry.node].name, -1), entry.number)
        if made.node >= 0 and made.number < len(step.shapes[made.node]):
            assert step.shapes[made.node][made.number] == (read[0].known.shape(value) or (1,)), value
            compared += 1
    assert compared > 8


@pytest.mark.parametrize("name", TRACED)
def test_what_is_traced_has_the_modules_parameters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build, x, beside = TRACED[name]
    check(tmp_path / "m.onnx", export(tmp_path / "m.onnx", build, x, dynamo=False), beside, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize("name", EXPORTED)
def test_what_dynamo_exports_has_them_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    build, x, beside = EXPORTED[name]
    check(tmp_path / "m.onnx", export(tmp_path / "m.onnx", build, x, dynamo=True), beside, monkeypatch)
