# ruff: noqa: ARG001 - the signatures are those of ops, and of what a dispatched op has
"""Run recurrent layers as on CUDA: one cuDNN op a layer, a fused op for cells."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from overspill.core.errors import UnsupportedError
from overspill.pytorch.fake_tensors import FakeTensor

aten = torch.ops.aten
# cuDNN's numbers of the kinds of layer (cudnnRNNMode_t), and how many gates each has.
_RELU, _TANH, _LSTM, _GRU = range(4)
_GATES = {_RELU: 1, _TANH: 1, _LSTM: 4, _GRU: 3}


def layer(mode: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return functions that run a recurrent layer of `mode` on plain and on packed inputs.

    aten/src/ATen/native/cudnn/RNN.cpp, `_cudnn_impl`: all layers, directions and steps are one op with one reserve.
    """

    def plain(
        x: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool,
    ) -> Any:  # fmt: skip
        return _run(mode, x, hx, params, num_layers, dropout, train, bidirectional, batch_first, ())

    def packed(
        data: Tensor, batch_sizes: Tensor, hx: Any, params: Any, has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        sizes = tuple(batch_sizes.tolist())
        return _run(mode, data, hx, params, num_layers, dropout, train, bidirectional, False, sizes)

    return plain, packed


LSTM, GRU, TANH, RELU = layer(_LSTM), layer(_GRU), layer(_TANH), layer(_RELU)


def _run(
    mode: int, x: Tensor, hx: Any, params: Any, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    batch_first: bool, batch_sizes: tuple[int, ...],
) -> Any:  # fmt: skip
    state, cell = (hx[0], hx[1]) if mode == _LSTM else (hx, None)
    if torch.is_autocast_enabled("cpu"):  # cudnn/AutocastRNN.cpp: everything is cast, the weights in each forward
        dtype = torch.get_autocast_dtype("cpu")
        x, state, params = x.to(dtype), state.to(dtype), [weight.to(dtype) for weight in params]
        cell = cell if cell is None else cell.to(dtype)
    # An LSTM may project its states to a smaller width.
    width, projection = params[1].shape[0] // _GATES[mode], 0
    if mode == _LSTM and state.shape[-1] != width:
        projection = state.shape[-1]
    per_layer = len(params) // (num_layers * (2 if bidirectional else 1))
    out, hy, cy, *_ = aten._cudnn_rnn(
        x, params, per_layer, None, state, cell, mode, width, projection, num_layers, batch_first, dropout,
        train, bidirectional, batch_sizes, None,
    )  # fmt: skip
    return (out, hy, cy) if mode == _LSTM else (out, hy)


def cudnn_rnn(
    x: Tensor, weight: Any, weight_stride0: int, weight_buf: Tensor | None, hx: Tensor, cx: Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: Any, dropout_state: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return output, last states and the reserve that cuDNN keeps for backward.

    For each layer, direction, step and sequence the reserve has the gates, the cell and the hidden state. Backward
    reads them (Appleyard et al., arXiv 1604.01946, equations 1 to 6). cuDNN does not publish its layout.
    """
    directions = 2 if bidirectional else 1
    width = (proj_size or hidden_size) * directions
    steps = x.shape[0] if batch_sizes else x.shape[0] * x.shape[1]
    kept = _GATES[mode] + (2 if mode == _LSTM else 1)
    reserve = steps * num_layers * directions * hidden_size * kept * x.element_size() if train else 0
    cy = x.new_empty((0,)) if cx is None else cx.new_empty(cx.shape)
    return (
        x.new_empty((*x.shape[:-1], width)), hx.new_empty(hx.shape), cy, x.new_empty((reserve,), dtype=torch.uint8),
        x.new_empty((0,)),
    )  # fmt: skip


def cudnn_rnn_backward(
    x: Tensor, weight: Any, weight_stride0: int, weight_buf: Any, hx: Tensor, cx: Tensor | None, output: Tensor,
    *rest: Any, **_: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Return gradients of input, states and weights; the latter are views of one buffer.

    RNN.cpp, `_cudnn_rnn_backward_weight`.
    """
    d_cx = None if cx is None else cx.new_empty(cx.shape)
    buffer = x.new_empty((sum(w.numel() for w in weight),))
    gradients, start = [], 0
    for w in weight:
        gradients.append(buffer.as_strided(w.shape, w.new_empty(w.shape).stride(), start))
        start += w.numel()
    return x.new_empty(x.shape), hx.new_empty(hx.shape), d_cx, gradients


# --- Cells ------------------------------------------------------------------------------------------------------------


def lstm_cell(
    x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Run an LSTM cell as on CUDA: two products and a fused kernel (aten/src/ATen/native/RNN.cpp, `LSTMCell`)."""
    linear = torch.nn.functional.linear
    hy, cy, _ = aten._thnn_fused_lstm_cell(linear(x, w_ih), linear(hx[0], w_hh), hx[1], b_ih, b_hh)
    return hy, cy


def gru_cell(
    x: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """Run a GRU cell as on CUDA: two products and a fused kernel (RNN.cpp, `GRUCell`)."""
    linear = torch.nn.functional.linear
    return aten._thnn_fused_gru_cell(linear(x, w_ih), linear(hx, w_hh), hx, b_ih, b_hh)[0]


def fused_lstm_cell(
    input_gates: Tensor, hidden_gates: Tensor, cx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Return new states, and gates for backward (aten/src/ATen/native/cuda/RNN.cu, `_thnn_fused_lstm_cell_cuda`)."""
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), input_gates.new_empty(input_gates.shape)


def fused_lstm_cell_backward(
    grad_hy: Tensor | None, grad_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> tuple[Any, ...]:
    """Return gradients of gates, cx and bias (RNN.cu, `_thnn_fused_lstm_cell_backward_impl_cuda`)."""
    bias = workspace.new_empty((workspace.shape[-1],)) if has_bias else None
    return workspace.new_empty(workspace.shape), cx.new_empty(cx.shape), bias


def fused_gru_cell(
    input_gates: Tensor, hidden_gates: Tensor, hx: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the new state, and five values a unit for backward (RNN.cu, `_thnn_fused_gru_cell_cuda`)."""
    return hx.new_empty(hx.shape), hx.new_empty((*hx.shape[:-1], hx.shape[-1] * 5))


def fused_gru_cell_backward(grad_hy: Tensor, workspace: Tensor, has_bias: bool) -> tuple[Any, ...]:
    """Return gradients of both gates, hx and biases (RNN.cu, `_thnn_fused_gru_cell_backward_cuda`)."""
    gates = (*grad_hy.shape[:-1], grad_hy.shape[-1] * 3)
    biases = [workspace.new_empty((gates[-1],)) if has_bias else None for _ in range(2)]
    return workspace.new_empty(gates), workspace.new_empty(gates), grad_hy.new_empty(grad_hy.shape), *biases


# --- Packing ----------------------------------------------------------------------------------------------------------


def pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """Return packed steps, and the number of sequences at each (PackedSequence.cpp, `_pack_padded_sequence`).

    Lengths are on the host, so they are known. Raises UnsupportedError for fake ones.
    """
    if isinstance(lengths, FakeTensor):
        raise UnsupportedError("pack_padded_sequence needs its lengths; give it a list, or a tensor made on the host")
    counts = lengths.tolist()
    sizes = torch.tensor([sum(count > step for count in counts) for step in range(counts[0])], dtype=torch.int64)
    rest = x.shape[2:]
    return x.new_empty((sum(counts), *rest)), sizes


def pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return padded sequences and their lengths (PackedSequence.cpp, `_pad_packed_sequence`).

    Steps with the same number of sequences are copied together. The lengths are on the host, and known.
    """
    sizes = batch_sizes.tolist()
    steps = max(total_length, len(sizes))
    out = data.new_full((steps, sizes[0], *data.shape[1:]), padding_value)
    first = offset = 0
    for step, size in enumerate(sizes):
        if step + 1 == len(sizes) or sizes[step + 1] != size:
            count = (step + 1 - first) * size
            piece = data[offset : offset + count].view(step + 1 - first, size, *data.shape[1:])
            out[first : step + 1, :size].copy_(piece)
            first, offset = step + 1, offset + count
    lengths = torch.tensor([sum(size > i for size in sizes) for i in range(sizes[0])], dtype=torch.int64)
    return out.transpose(0, 1) if batch_first else out, lengths
