"""Recurrent layers as CUDA runs them: their reserve, their gradients in one buffer, packed sequences, fused cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.fake_cuda.retargeting import aten, cuda, names, row, run
from torch import nn

from overspill.capture.recording.recording import Recording
from overspill.core import Phase


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Recording:
    def program() -> None:
        layer = kind(8, 16, **options).cuda()
        x = cuda(5, 3, 8, grad=True)
        out, state = layer(x)
        hidden = state[0] if isinstance(state, tuple) else state
        directions = 2 if options.get("bidirectional") else 1
        width = options.get("proj_size") or 16
        assert out.shape == (5, 3, width * directions)
        assert hidden.shape == (
            options.get("num_layers", 1) * directions,
            5 if options.get("batch_first") else 3,
            width,
        )
        (out.sum() + hidden.sum()).backward()
        assert all(weight.grad.shape == weight.shape for weight in layer.parameters())
        assert x.grad.shape == x.shape

    return run(program)


KINDS: dict[str, tuple[type[nn.RNNBase], dict[str, Any], int]] = {
    "LSTM": (nn.LSTM, {}, 4 + 2),
    "GRU": (nn.GRU, {}, 3 + 1),
    "tanh": (nn.RNN, {}, 1 + 1),
    "ReLU": (nn.RNN, {"nonlinearity": "relu"}, 1 + 1),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "both directions": {"bidirectional": True},
    "layers with dropout": {"num_layers": 3, "dropout": 0.3},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
}


@row(
    aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input,
    aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default,
)  # fmt: skip
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_recurrent_layer_is_one_op_with_a_reserve(kind: str, variant: str) -> None:
    cell, options, kept = KINDS[kind]
    recording = recurrent(cell, **options, **VARIANTS[variant])
    assert names(recording).count("_cudnn_rnn") == names(recording).count("_cudnn_rnn_backward") == 1
    layers, directions = VARIANTS[variant].get("num_layers", 1), 2 if VARIANTS[variant].get("bidirectional") else 1
    forward = [a.nbytes for a in recording.allocations if a.name == "_cudnn_rnn" and a.nbytes]
    assert 4 * 15 * 16 * layers * directions * kept in forward


def test_an_lstm_with_a_projection_has_narrower_outputs() -> None:
    assert "_cudnn_rnn" in names(recurrent(nn.LSTM, proj_size=4))


def test_gradients_of_recurrent_weights_are_one_buffer() -> None:
    """RNN.cpp, `_cudnn_rnn_backward_weight`: gradients are views of `dw`."""
    gradients = [a for a in recurrent(nn.LSTM).allocations if a.name == "_cudnn_rnn_backward"]
    assert max(a.nbytes for a in gradients) == 4 * 4 * 16 * (8 + 16 + 2)


def test_a_recurrent_layer_that_only_infers_has_no_reserve() -> None:
    def program() -> None:
        with torch.no_grad():
            nn.LSTM(8, 16).cuda().eval()(cuda(5, 3, 8))

    made = [a.nbytes for a in run(program).allocations if a.name == "_cudnn_rnn" and a.nbytes]
    assert sorted(made) == sorted([4 * 15 * 16, 4 * 3 * 16, 4 * 3 * 16])


@row(
    aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data, aten._pack_padded_sequence.default,
    aten._pad_packed_sequence.default,
)  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [[5, 3, 2], [2, 5, 3]])
def test_packed_sequences_take_only_their_steps(kind: str, lengths: list[int]) -> None:
    cell, options, kept = KINDS[kind]
    in_order = lengths == sorted(lengths, reverse=True)

    def program() -> None:
        x = cuda(3, 5, 8, grad=True)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=in_order)
        assert packed.data.shape == (10, 8)
        assert packed.batch_sizes.tolist() == [3, 3, 2, 1, 1]
        out, _ = cell(8, 16, batch_first=True, **options).cuda()(packed)
        padded, back = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
        assert padded.shape == (3, 5, 16)
        assert back.tolist() == lengths if in_order else back.shape == (3,)  # the order is on the device by then
        padded.sum().backward()
        assert x.grad.shape == x.shape

    made = [a.nbytes for a in run(program).allocations if a.name == "_cudnn_rnn"]
    assert 4 * 10 * 16 * kept in made


def test_packing_by_lengths_on_the_device_is_an_error() -> None:
    def program() -> None:
        nn.utils.rnn.pack_padded_sequence(cuda(5, 3, 8), torch.randint(5, (3,), device="cuda").cpu())

    with pytest.raises(Exception, match="on the host"):
        run(program)


@row(
    aten.lstm_cell.default, aten.gru_cell.default, aten._thnn_fused_lstm_cell.default,
    aten._thnn_fused_lstm_cell_backward_impl.default, aten._thnn_fused_gru_cell.default,
    aten._thnn_fused_gru_cell_backward.default,
)  # fmt: skip
def test_cells_are_fused_and_keep_their_gates() -> None:
    """aten/src/ATen/native/cuda/RNN.cu: a workspace of 4 values a unit in an LSTM's, 5 in a GRU's."""
    for kind, values, states in ((nn.LSTMCell, 4, 2), (nn.GRUCell, 5, 1)):

        def program(kind: Any = kind) -> None:
            cell, x = kind(8, 16).cuda(), cuda(3, 8, grad=True)
            out = cell(x)
            (out[0] if isinstance(out, tuple) else out).sum().backward()
            assert all(weight.grad.shape == weight.shape for weight in cell.parameters())
            assert x.grad.shape == x.shape

        recording = run(program)
        fused = "_thnn_fused_lstm_cell" if values == 4 else "_thnn_fused_gru_cell"
        assert fused in names(recording)
        made = [a.nbytes for a in recording.allocations if a.name == fused]
        assert sorted(made) == sorted([4 * 3 * 16] * states + [4 * 3 * 16 * values])
        assert any(name.startswith(f"{fused}_backward") for name in names(recording, Phase.BACKWARD))
