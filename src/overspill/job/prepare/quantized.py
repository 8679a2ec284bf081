"""Linear layers with 4-bit or 8-bit weights, in bitsandbytes' formats.

Their forward and backward make tensors of the right sizes, without bitsandbytes. 4 bits is NF4 (Dettmers et al.,
"QLoRA", 2023, §3): two values a byte, a float32 scale for 64 values. With double quantisation the scale has 8 bits, and
256 of those scales have one in float32. 8 bits is LLM.int8 (Dettmers et al., 2022): a byte a value and a float32 scale
a row. Forward and backward make and keep what bitsandbytes/autograd/_functions.py (`MatMul4Bit`, `MatMul8bitLt`) and
nn/modules.py, 0.49, do.

Known limit: how many columns of an activation are outliers in LLM.int8 depends on values; none is assumed.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError
from overspill.models import Quantization

from .linear import bias_of, heads, linear_layers, replace_layer, width_of

_BLOCK, _BLOCK_OF_SCALES = 64, 256  # values that share a scale, and scales that share one
_LEVELS = 16


def quantize_weights(model: nn.Module, said: Quantization, compute: torch.dtype) -> None:
    """Replace the linear layers of `model` by quantised ones.

    Some stay, as in transformers: those that `said` keeps (by default the output's), and those that the model keeps in
    float32 (the second of T5's feed-forward layers). `compute` is the dtype of products. Raises RequestError if no
    layer is left to quantise.
    """
    kept, names = heads(model), {*(getattr(model, "_keep_in_fp32_modules", None) or ())}
    if said.kept is not None:  # names take the place of the output's layer, unless it is the embedding
        shared: Any = model.get_input_embeddings()  # of transformers
        kept = {layer for layer in kept if layer.weight is shared.weight}
    # transformers/quantizers/quantizers_utils.py, `should_convert_module`: from the start on, or the end.
    named = [re.compile(rf"(?:{key})(?:(?<=\.)|(?=\.|$))|.*{re.escape(key)}$") for key in said.kept or ()]
    layers = {
        n: layer for n, layer in linear_layers(model)
        if layer not in kept and names.isdisjoint(n.split(".")) and not any(each.match(n) for each in named)
    }  # fmt: skip
    if not layers:
        raise RequestError(
            f"{type(model).__name__} has no linear layers besides its output to be quantised; leave quantize= out"
        )
    for name, layer in layers.items():
        double = said.kind != "4bit-single"
        new = Linear8bit(layer) if said.kind == "8bit" else Linear4bit(layer, compute, double=double)
        replace_layer(model, name, new)


def _frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="cpu"), requires_grad=False)


class Quantized(nn.Module):
    """A linear layer with a quantised weight."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.in_features, self.out_features = width_of(layer)
        self.bias = bias_of(layer)


class Linear4bit(Quantized):
    """A 4-bit linear layer; each product dequantises its whole weight."""

    def __init__(self, layer: nn.Module, compute: torch.dtype, *, double: bool) -> None:
        super().__init__(layer)
        self.compute, self.double = compute, double
        values = self.in_features * self.out_features
        blocks = -(-values // _BLOCK)
        self.weight = _frozen(-(-values // 2), 1, dtype=torch.uint8)
        self.absmax = _frozen(blocks, dtype=torch.uint8 if double else torch.float32)
        if double:
            self.nested_absmax = _frozen(-(-blocks // _BLOCK_OF_SCALES), dtype=torch.float32)
            self.offset = _frozen(dtype=torch.float32)
        self.code = _frozen(_LEVELS, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in the dtype of `x`."""
        dtype, x = x.dtype, x.to(self.compute)
        bias = None if self.bias is None else self.bias.to(self.compute)
        if x.numel() == x.shape[-1] and not x.requires_grad:
            # gemv_4bit: one row is multiplied by the weight as it is.
            scales = self._scales()
            out = x.new_empty((*x.shape[:-1], self.out_features))
            del scales
            out = out if bias is None else out.add_(bias)
        else:
            out = _Product4bit.apply(x, self, bias)
        return out.to(dtype)

    def dequantized(self, like: Tensor) -> Tensor:
        """Return the weight in the dtype of products, on the device of `like`.

        Its scales are dequantised first.
        """
        # One op that reads the weight and its scales, and makes a tensor of the right size.
        values = self.weight.view(-1)[:1].expand(self.out_features, self.in_features)
        return torch.mul(values, self._scales()[:1].to(self.compute)).to(like.dtype)

    def _scales(self) -> Tensor:
        """Return the scales in float32; those of 8 bits are dequantised."""
        return torch.add(self.absmax, self.offset) if self.double else self.absmax


class _Product4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear4bit, bias: Tensor | None) -> Tensor:
        """Return the product; its inputs are not kept, because the weight gets no gradient."""
        ctx.layer = layer
        return F.linear(x, layer.dequantized(x), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        """Return the gradient of `x`."""
        return torch.matmul(grad, ctx.layer.dequantized(grad)) if ctx.needs_input_grad[0] else None, None, None


class Linear8bit(Quantized):
    """An 8-bit linear layer: integer products, dequantised only for the gradient."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.weight = _frozen(self.out_features, self.in_features, dtype=torch.int8)
        self.SCB = _frozen(self.out_features, dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product, in the dtype of `x`."""
        return _Product8bit.apply(x, self)


class _Product8bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Linear8bit) -> Tensor:
        """Return the product of int8 rows, in int32 and then dequantised."""
        ctx.layer = layer
        # As bitsandbytes has it (`ctx.tensors`), and not saved: so checkpoints without reentrance do not give it up.
        ctx.x = x if ctx.needs_input_grad[0] else None
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        outliers = half.abs() >= 6.0
        del outliers
        whole, scales = torch.empty_like(half, dtype=torch.int8), half.new_empty(len(half), dtype=torch.float32)
        del half
        of_weight = layer.weight.view(-1)[:1].to(torch.int32)  # which the product reads
        product = of_weight.expand(*x.shape[:-1], layer.out_features).contiguous()
        out = torch.empty_like(product, dtype=torch.float16)
        del product, whole, scales
        out = out.to(x.dtype)
        if layer.bias is not None:
            out.add_(layer.bias.to(x.dtype))
        return out  # and no view, for models add to it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        """Return the gradient of `x`."""
        if not ctx.needs_input_grad[0]:
            return None, None
        x: Tensor = ctx.x
        layer: Linear8bit = ctx.layer
        weight = layer.weight.to(x.dtype).mul_(layer.SCB.unsqueeze(1).mul(1 / 127))
        rows = grad.reshape(-1, grad.shape[-1]).to(x.dtype)
        return torch.matmul(rows, weight).view(x.shape), None
