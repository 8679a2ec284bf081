"""A test a row of the retarget table: what CUDA runs, and what memory that takes, as PyTorch's sources have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from overspill.capture import attention, retarget
from overspill.capture.eager import record
from overspill.capture.recorder import Recorder
from overspill.capture.recording import Recording
from overspill.core import Phase, TensorKind
from overspill.core.errors import RequestError
from overspill.costs.scratch import Scratch, Software, scratch_bytes

aten = torch.ops.aten
F = torch.nn.functional
TESTED: set[Any] = set()
HALF = torch.float16


def row(*ops: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Marks a test as that of these rows."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        TESTED.update(ops)
        return test

    return mark


def test_every_row_has_a_test() -> None:
    rows = {*retarget.COMPOSITES, *retarget.FAKES, *retarget.SCRATCH}
    assert sorted(str(op) for op in rows - TESTED) == []
    assert sorted(str(op) for op in TESTED - rows) == []


def run(program: Callable[[], Any], capability: tuple[int, int] = (8, 0)) -> Recording:
    return record(lambda _: program(), capability=capability)


def names(recording: Recording, phase: Phase | None = None) -> list[str]:
    views = {
        "view",
        "expand",
        "t",
        "transpose",
        "slice",
        "detach",
        "unsqueeze",
        "squeeze",
        "select",
        "_unsafe_view",
        "alias",
    }
    return [op.name for op in recording.ops if op.name not in views and phase in {None, op.phase}]


def scratches(recording: Recording) -> list[Scratch]:
    return [a.scratch for a in recording.allocations if a.scratch is not None and a.scratch.family != "gemm_handle"]


def taken(recording: Recording, capability: str = "8.0") -> list[int]:
    """The likely bytes of each scratch, in order."""
    return [scratch_bytes(s, capability, Software()).central for s in scratches(recording)]


def cuda(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_(grad)


def live_after(forward: Callable[[], Any]) -> int:
    """Bytes that a forward pass leaves: its result and what it keeps for backward."""
    seen = []

    def program(recorder: Recorder) -> None:
        before = recorder.live_bytes
        kept = forward()
        seen.append(recorder.live_bytes - before)
        del kept

    record(program)
    return seen[0]


# --- COMPOSITES -------------------------------------------------------------------------------------------------------


@row(aten.dropout.default)
def test_dropout_keeps_a_mask_of_one_byte() -> None:
    recording = run(lambda: F.dropout(cuda(100, grad=True) * 1, 0.5).sum().backward())
    assert "native_dropout" in names(recording)
    assert "native_dropout_backward" in names(recording)

    def forward() -> Any:
        x = cuda(1000, dtype=HALF, grad=True)
        return x, F.dropout(x, 0.1)

    assert live_after(forward) == 2 * 1000 + 2 * 1000 + 1000
    assert names(run(lambda: F.dropout(cuda(10), 0.5, training=False)))[1:] == []
    assert names(run(lambda: F.dropout(cuda(10), 0.0)))[1:] == []
    everything = run(lambda: F.dropout(cuda(1000), 1.0))
    assert everything.peak_requested_bytes == 2 * 4000 + 4  # Dropout.cpp multiplies by a zero of no dimension


@row(aten.softmax.int, aten.log_softmax.int)
def test_softmax_of_float16_into_float32_makes_no_copy() -> None:
    for function in (F.softmax, F.log_softmax):
        x = lambda dtype: cuda(10, 100, dtype=dtype)  # noqa: E731
        half = run(lambda f=function, x=x: f(x(HALF), 1, dtype=torch.float32))
        assert "_to_copy" not in names(half)
        assert half.peak_requested_bytes == 1000 * (2 + 4)
        # SoftMax.cpp has the kernel for Half alone.
        brain = run(lambda f=function, x=x: f(x(torch.bfloat16), 1, dtype=torch.float32))
        assert "_to_copy" in names(brain)
        assert brain.peak_requested_bytes == 1000 * (2 + 4 + 4)


@row(aten.linear.default)
def test_a_linear_layers_bias_is_added_in_place_where_it_is_an_op_of_its_own() -> None:
    """Linear.cpp, `linear`: contiguous inputs take one op; others a product, whose result the bias is added to."""

    def ops(make: Callable[[], Tensor], **options: Any) -> list[str]:
        found = names(run(lambda: nn.Linear(16, 8, **options).cuda()(make())))
        return [name for name in found if name in {"mm", "addmm", "add", "add_", "bmm"}]

    assert ops(lambda: cuda(2, 3, 16)) == ops(lambda: cuda(2, 3, 5, 16)) == ops(lambda: cuda(16)) == ["addmm"]
    assert ops(lambda: cuda(3, 2, 16).transpose(0, 1)) == ["mm", "add_"]
    assert ops(lambda: cuda(2, 16, 3, 5).permute(0, 2, 3, 1)) == ["mm", "add_"]
    assert ops(lambda: cuda(3, 2, 16).transpose(0, 1), bias=False) == ["mm"]


H, T, W = 4, 64, 32


def qkv(
    dtype: torch.dtype = HALF, width: int = W, heads: int = H, keys: int = T, kv_heads: int | None = None,
    dim: int = 4, grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    def make(h: int, t: int) -> Tensor:
        return cuda(*((2, h, t, width) if dim == 4 else (h, t, width)), dtype=dtype, grad=grad)

    return make(heads, T), make(kv_heads or heads, keys), make(kv_heads or heads, keys)


CHOICES: dict[str, tuple[str, tuple[int, int], dict[str, Any], dict[str, Any]]] = {
    "half": ("flash", (8, 0), {}, {}),
    "bfloat16": ("flash", (9, 0), {"dtype": torch.bfloat16}, {}),
    "half, before Ampere": ("efficient", (7, 5), {}, {}),
    "bfloat16, before Ampere": ("math", (7, 5), {"dtype": torch.bfloat16}, {}),
    "float": ("efficient", (8, 0), {"dtype": torch.float32}, {}),
    "double": ("math", (8, 0), {"dtype": torch.float64}, {}),
    "half, with a mask": ("efficient", (8, 0), {}, {"mask": True}),
    "float, with a mask": ("efficient", (8, 6), {"dtype": torch.float32}, {"mask": True}),
    "half, with dropout": ("flash", (8, 0), {}, {"dropout_p": 0.1}),
    "half, causal": ("flash", (8, 0), {}, {"is_causal": True}),
    "half, causal, fewer keys": ("efficient", (8, 0), {"keys": 48}, {"is_causal": True}),
    "half, fewer keys": ("flash", (8, 0), {"keys": 48}, {}),
    "half, an odd width": ("flash", (8, 0), {"width": 20}, {}),
    "half with a mask, an odd width": ("math", (8, 0), {"width": 20}, {"mask": True}),
    "float, an odd width": ("math", (8, 0), {"dtype": torch.float32, "width": 30}, {}),
    "float, an odd width, before Ampere": ("efficient", (7, 5), {"dtype": torch.float32, "width": 30}, {}),
    "half, rows of 256": ("flash", (8, 0), {"width": 256}, {}),
    "half, rows of 264": ("efficient", (8, 0), {"width": 264}, {}),
    "half, rows of 224, a consumer's GPU": ("efficient", (8, 6), {"width": 224}, {}),
    "half, rows of 224, a consumer's GPU, no gradients": ("flash", (8, 6), {"width": 224, "grad": False}, {}),
    "half, rows of 256, a consumer's GPU": ("flash", (8, 9), {"width": 256}, {}),
    "half, rows of 256, a consumer's GPU, dropout": ("efficient", (12, 0), {"width": 256}, {"dropout_p": 0.1}),
    "half, shared keys": ("flash", (8, 0), {"kv_heads": 2}, {"enable_gqa": True}),
    "float, shared keys": ("math", (8, 0), {"kv_heads": 2, "dtype": torch.float32}, {"enable_gqa": True}),
    "three dimensions": ("math", (8, 0), {"dim": 3}, {}),
    "no keys": ("math", (8, 0), {"keys": 0}, {}),
    "Pascal": ("efficient", (6, 0), {}, {}),
}
OPS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "math": "_safe_softmax",
}


@row(aten.scaled_dot_product_attention.default)
@pytest.mark.parametrize("case", CHOICES)
def test_attention_takes_the_kernel_that_cuda_takes_for(case: str) -> None:
    """sdp_utils.cpp, `select_sdp_backend`."""
    kernel, capability, inputs, options = CHOICES[case]

    def program() -> None:
        query, key, value = qkv(**inputs)
        kwargs = dict(options)
        if kwargs.pop("mask", False):
            kwargs["attn_mask"] = cuda(query.shape[-2], key.shape[-2], dtype=query.dtype)
        out = F.scaled_dot_product_attention(query, key, value, **kwargs)
        assert out.shape == (*query.shape[:-1], value.shape[-1])
        if out.requires_grad:
            out.sum().backward()

    found = names(run(program, capability))
    assert [k for k, op in OPS.items() if op in found] == [kernel]
    if inputs.get("grad", True):
        assert kernel == "math" or f"{OPS[kernel]}_backward" in found


@row(aten._scaled_dot_product_attention_math.default)
def test_attention_in_single_ops_adds_its_mask_in_place() -> None:
    """attention.cpp, `_scaled_dot_product_attention_math`: the scores are float, and at most three of them at once."""

    def program() -> None:
        with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            F.scaled_dot_product_attention(*qkv(torch.float32), attn_mask=cuda(T, T), dropout_p=0.1)

    recording = run(program)
    assert [n for n in names(recording) if n.startswith("add")] == ["add_"]
    assert "native_dropout" in names(recording)
    half = run(lambda: _math(torch.float16))
    assert names(half)[3:6] == ["_to_copy"] * 3
    scores = 2 * H * T * T
    assert [a.nbytes for a in half.allocations if a.name == "_safe_softmax" and a.nbytes] == [4 * scores]


def _math(dtype: torch.dtype, **kwargs: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        return F.scaled_dot_product_attention(*qkv(dtype), **kwargs)


def test_kernels_that_the_program_turns_off_are_not_taken() -> None:
    def chosen(*backends: SDPBackend, masked: bool = False) -> list[str]:
        def program() -> None:
            mask = cuda(T, T, dtype=HALF) if masked else None
            with sdpa_kernel(list(backends)):
                F.scaled_dot_product_attention(*qkv(), attn_mask=mask)

        found = names(run(program))
        return [kernel for kernel, op in OPS.items() if op in found]

    flash, efficient, plain = SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    assert chosen(flash, plain) == ["flash"]
    assert chosen(efficient, plain) == ["efficient"]
    assert chosen(plain) == ["math"]
    with pytest.raises(RequestError, match="No available kernel"):
        chosen(flash, masked=True)


def test_global_switches_of_kernels_are_respected() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        assert OPS["efficient"] in names(run(lambda: F.scaled_dot_product_attention(*qkv())))
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_expanded_keys_of_a_cache_are_dense_enough() -> None:
    def program() -> None:
        query, key, value = qkv(kv_heads=1)
        F.scaled_dot_product_attention(query, key.expand(2, H, T, W), value.expand(2, H, T, W))

    assert OPS["flash"] in names(run(program))


def test_rows_that_are_not_side_by_side_go_the_long_way() -> None:
    def program() -> None:
        query, key, value = (t.transpose(-1, -2) for t in qkv(width=T))
        F.scaled_dot_product_attention(query, key, value)

    assert OPS["math"] in names(run(program))


@pytest.mark.parametrize(("keys", "padded"), [(64, False), (60, True)])
def test_masks_whose_rows_do_not_start_at_multiples_of_eight_are_padded(keys: int, padded: bool) -> None:
    """attention.cpp, `preprocess_mask`."""

    def program() -> None:
        query, key, value = qkv(keys=keys, grad=False)
        F.scaled_dot_product_attention(query, key, value, attn_mask=cuda(T, keys, dtype=HALF))

    assert ("constant_pad_nd" in names(run(program))) is padded


def test_boolean_masks_become_numbers_of_the_querys_dtype() -> None:
    def program() -> None:
        query, key, value = qkv(grad=False)
        mask = torch.zeros(T, T, dtype=torch.bool, device="cuda")
        F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    made = [a.nbytes for a in run(program).allocations if a.name == "where"]
    assert made == [2 * T * T]


def test_attention_on_the_host_is_the_hosts_own() -> None:
    expected = F.scaled_dot_product_attention(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8))

    def program() -> None:
        x = torch.ones(1, 1, 4, 8)
        assert torch.equal(F.scaled_dot_product_attention(x, x, x), expected)
        assert torch.equal(F.softmax(torch.ones(2), 0), torch.tensor([0.5, 0.5]))

    run(program)


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
        nn.utils.rnn.pack_padded_sequence(cuda(5, 3, 8), torch.tensor([5, 3, 2]).cuda().cpu())

    with pytest.raises(Exception, match="made on the host"):
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


@row(aten.rms_norm.default, aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)
def test_rms_norm_is_one_kernel_that_keeps_a_float_a_row() -> None:
    def forward() -> Any:
        x, norm = cuda(10, 64, dtype=HALF, grad=True), nn.RMSNorm(64, dtype=HALF, device="cuda")
        return x, norm, norm(x)

    assert live_after(forward) == 2 * (640 + 64 + 640) + 4 * 10
    recording = run(lambda: nn.RMSNorm(64).cuda()(cuda(10, 64, grad=True)).sum().backward())
    assert "_fused_rms_norm_backward" in names(recording)
    mixed = run(lambda: nn.RMSNorm(64).cuda()(cuda(10, 64, dtype=HALF)))
    assert "_fused_rms_norm" not in names(mixed)  # layer_norm.cpp: the weight has another dtype
    many = run(lambda: nn.RMSNorm(32).cuda()(cuda(70000, 32, grad=True)).sum().backward())
    assert taken(many)[-1] == 4 * 32 * -(-70000 // 32)


@row(aten.gather_backward.default)
def test_the_gradient_of_gather_is_scattered_in_place() -> None:
    index = lambda: torch.zeros(10, 2, dtype=torch.int64, device="cuda")  # noqa: E731
    recording = run(lambda: cuda(10, 100, grad=True).gather(1, index()).sum().backward())
    assert names(recording, Phase.BACKWARD)[-2:] == ["new_zeros", "scatter_add_"]


@row(aten.value_selecting_reduction_backward.default)
@pytest.mark.parametrize("keepdim", [False, True])
def test_the_gradient_of_a_maximum_is_scattered_in_place(keepdim: bool) -> None:
    def program() -> None:
        x = cuda(10, 100, grad=True)
        x.max(1, keepdim=keepdim).values.sum().backward()
        assert x.grad.shape == x.shape

    assert names(run(program), Phase.BACKWARD)[-2:] == ["new_zeros", "scatter_"]


@row(aten.ctc_loss.Tensor, aten._ctc_loss.default, aten._ctc_loss_backward.default)
@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_ctc_keeps_its_forward_variables_and_takes_as_much_in_backward(where: str) -> None:
    """LossCTC.cu: `log_alpha` is batch by steps by twice the longest target and one."""

    def program() -> None:
        scores = cuda(20, 2, 6, grad=True)
        lengths = torch.tensor([20, 18], device=where), torch.tensor([5, 4], device=where)
        targets = torch.ones(2, 5, dtype=torch.int64, device="cuda")
        F.ctc_loss(scores.log_softmax(2), targets, *lengths).backward()
        assert scores.grad.shape == scores.shape

    recording = run(program)
    made = [a.nbytes for a in recording.allocations if a.name == "_ctc_loss"]
    assert sorted(made) == [2 * 4, 4 * 2 * 20 * 11]
    assert taken(recording) == [4 * 2 * 20 * 11]


@row(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr, aten._fused_adagrad_.default, aten._fused_adagrad_.tensor_lr)
def test_fused_optimizers_take_nothing_and_compute_nothing() -> None:
    def program() -> None:
        weight = nn.Parameter(cuda(100))
        weight.grad = cuda(100)
        for lr in (0.1, torch.tensor(0.1, device="cuda")):
            torch.optim.SGD([weight], lr=lr, momentum=0.9, fused=True).step()

    updates = [op for op in run(program).ops if op.name == "_fused_sgd_"]
    assert len(updates) == 2
    assert retarget.FAKES[aten._fused_adagrad_.default]() is None


# --- SCRATCH ----------------------------------------------------------------------------------------------------------


def convolution(
    kind: type[nn.Module], *arguments: Any, size: tuple[int, ...], layout: Any = None, **options: Any
) -> Recording:
    def program() -> None:
        layer = kind(*arguments, **options).cuda()
        x = cuda(*size)
        if layout is not None:
            layer, x = layer.to(memory_format=layout), x.to(memory_format=layout)
        layer(x.requires_grad_()).sum().backward()

    return run(program)


CONVOLUTIONS: dict[str, Any] = {
    "1d": (nn.Conv1d, (8, 16, 3), (2, 8, 9)),
    "2d": (nn.Conv2d, (8, 16, 3), (2, 8, 9, 9)),
    "3d": (nn.Conv3d, (8, 16, 3), (2, 8, 9, 9, 9)),
}


@row(aten.convolution.default, aten.convolution_backward.default)
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_a_convolution_has_a_workspace_each_way(case: str) -> None:
    """Conv_v8.cpp, `run_conv_plan`: one for the output, one for the input's gradient, one for the weight's."""
    kind, arguments, size = CONVOLUTIONS[case]
    found = scratches(convolution(kind, *arguments, size=size))
    assert [s.family for s in found] == ["conv_forward", "conv_backward_data", "conv_backward_weight"]
    taps, dimensions = 3 ** (len(size) - 2), len(size) - 2
    outside = 2 * 16 * 7**dimensions
    assert all(
        s.sizes == (2 * 8 * 9**dimensions, 8 * 16 * taps, outside, 2, 8, 16, 1, taps, 1, 0, dimensions) for s in found
    )
    assert {s.dtype for s in found} == {"float32"}


def test_a_transposed_convolution_is_another_ones_backward() -> None:
    found = scratches(convolution(nn.ConvTranspose2d, 8, 16, 3, stride=2, size=(2, 8, 9, 9)))
    assert [s.family for s in found] == ["conv_backward_data", "conv_forward", "conv_backward_weight"]
    assert found[0].sizes == (2 * 16 * 19 * 19, 8 * 16 * 9, 2 * 8 * 81, 2, 16, 8, 1, 9, 2, 0, 2)


def test_groups_layout_and_stride_are_told() -> None:
    grouped = scratches(convolution(nn.Conv2d, 8, 16, 3, groups=4, stride=2, size=(2, 8, 9, 9)))
    assert {s.sizes[6] for s in grouped} == {4}
    assert {s.sizes[8] for s in grouped} == {2}
    last = scratches(convolution(nn.Conv2d, 8, 16, 3, size=(2, 8, 9, 9), layout=torch.channels_last))
    assert {s.sizes[9] for s in last} == {1}
    deep = scratches(convolution(nn.Conv2d, 8, 8, 3, groups=8, size=(2, 8, 9, 9)))
    assert taken_of(deep) == [0, 0, 0]


def taken_of(found: list[Scratch]) -> list[int]:
    return [scratch_bytes(s, "8.6", Software()).central for s in found]


def test_one_image_without_a_batch_is_a_batch_of_one() -> None:
    found = scratches(convolution(nn.Conv2d, 8, 16, 3, size=(8, 9, 9)))
    assert {s.sizes[3] for s in found} == {1}
    assert {s.sizes[0] for s in found} == {8 * 81}


def test_the_first_layer_needs_no_gradient_of_its_input() -> None:
    found = scratches(run(lambda: nn.Conv2d(8, 16, 3).cuda()(cuda(2, 8, 9, 9)).sum().backward()))
    assert [s.family for s in found] == ["conv_forward", "conv_backward_weight"]
    frozen = scratches(
        run(lambda: nn.Conv2d(8, 4, 3).cuda().requires_grad_(False)(cuda(2, 8, 9, 9, grad=True)).sum().backward())
    )
    assert [s.family for s in frozen] == ["conv_forward", "conv_backward_data"]


@row(aten._scaled_dot_product_flash_attention_backward.default)
@pytest.mark.parametrize(("width", "rounded"), [(32, 32), (40, 64), (96, 96), (136, 192), (256, 256)])
def test_flash_attention_accumulates_the_querys_gradient_in_float(width: int, rounded: int) -> None:
    """flash_api.cpp, `mha_bwd`: rows to 128; `head_size_rounded` to 32, beyond 128 to 64."""
    recording = run(lambda: F.scaled_dot_product_attention(*qkv(width=width)).sum().backward())
    assert taken(recording) == [4 * 2 * H * 128 * (rounded + 1)]


def test_flash_attention_with_shared_keys_makes_their_gradients_for_every_head() -> None:
    recording = run(lambda: F.scaled_dot_product_attention(*qkv(kv_heads=2), enable_gqa=True).sum().backward())
    assert taken(recording) == [4 * 2 * H * 128 * (W + 1) + 2 * 2 * (2 * H * T * W)]


@row(aten._scaled_dot_product_efficient_attention_backward.default)
def test_efficient_attention_accumulates_half_gradients_in_float() -> None:
    """attention_backward.cu: `delta`, from a product in float inputs; for half ones accumulators of all gradients."""
    rows, values = 2 * H * T, 2 * H * T * W
    full = run(lambda: F.scaled_dot_product_attention(*qkv(torch.float32)).sum().backward())
    assert taken(full) == [4 * values, 4 * 2 * rows]
    half = run(lambda: F.scaled_dot_product_attention(*qkv()).sum().backward(), (7, 5))
    assert taken(half, "7.5") == [4 * (rows + 3 * values)]


@row(aten._safe_softmax.default)
def test_the_safe_softmax_makes_the_plain_one_and_a_mask() -> None:
    assert taken(run(lambda: _math(torch.float32))) == [2 * H * T * T * (4 + 1)]


@row(aten._native_multi_head_attention.default, aten._transformer_encoder_layer_fwd.default)
@pytest.mark.parametrize("norm_first", [False, True])
def test_the_fast_path_of_encoders_has_its_parts_inside(norm_first: bool) -> None:
    """transformer.cpp: queries, keys, values, their attention and its projection; or the hidden values."""

    def inside(hidden: int, *, masked: bool = False) -> list[int]:
        def program() -> None:
            layer = nn.TransformerEncoderLayer(16, 4, hidden, batch_first=True, norm_first=norm_first).cuda().eval()
            mask = torch.zeros(20, 20, device="cuda") if masked else None
            with torch.no_grad():
                layer(cuda(2, 20, 16), src_mask=mask)

        return taken(run(program))

    unit, norm = 4 * 2 * 20 * 16, int(norm_first)
    assert inside(8) == [(5 + norm) * unit]
    assert inside(160) == [(2 + norm + 10) * unit]
    assert inside(8, masked=True) == [norm * unit + 3 * unit + 2 * (4 * 2 * 4 * 20 * 20)]

    def attend() -> None:
        x = cuda(2, 20, 16)
        with torch.no_grad():
            nn.MultiheadAttention(16, 4, batch_first=True).cuda().eval()(x, x, x, need_weights=False)

    assert taken(run(attend)) == [5 * unit]


@row(aten.embedding_dense_backward.default)
def test_an_embeddings_backward_sorts_many_indices_and_sums_runs_of_them() -> None:
    """Embedding.cu: 3072 indices are few. EmbeddingBackwardKernel.cu: a row a run, and one more each further ten."""

    def program(indices: int, rows: int = 100, **options: Any) -> list[int]:
        def step() -> None:
            table = nn.Embedding(rows, 64, **options).cuda()
            table(torch.zeros(indices, dtype=torch.int64, device="cuda")).sum().backward()

        return taken(run(step))

    assert program(3072) == []
    assert program(3073) == [8 * 5 * 3073, 4 * 64 * (307 + 100)]
    assert program(4000, rows=50000) == [8 * (3 * 4000 + 2 * 4000 + 4400), 4 * 64 * (400 + 4000)]
    assert len(program(100, scale_grad_by_freq=True)) == 2


@row(aten._embedding_bag_backward.default)
def test_a_bag_of_embeddings_sorts_however_few_they_are_unless_it_takes_the_largest() -> None:
    def program(mode: str) -> list[int]:
        def step() -> None:
            table = nn.EmbeddingBag(100, 64, mode=mode).cuda()
            table(torch.zeros(10, 5, dtype=torch.int64, device="cuda")).sum().backward()

        return taken(run(step))

    assert program("sum") == program("mean") == [8 * (5 * 50 + 55), 4 * 64 * (5 + 50)]
    assert program("max") == []


@row(aten.sort.default, aten.sort.stable)
def test_sorting_takes_memory_where_rows_are_long() -> None:
    """Sort.cpp, `should_use_small_sort`: 4096. SortStable.cu: by how many rows there are; cub takes all once more."""

    def sorted_(rows: int, length: int, dim: int = 1, **options: Any) -> list[int]:
        shape = (rows, length) if dim == 1 else (length, rows)
        return taken(run(lambda: torch.sort(cuda(*shape), dim=dim, **options)))

    assert sorted_(10, 4096) == [8 * 4096]
    assert sorted_(1, 5000) == [8 * 5000 + 12 * 5000]
    assert sorted_(10, 5000) == [(16 + 4) * 50000 + 12 * 50000]
    assert sorted_(200, 5000) == sorted_(200, 5000, stable=True) == [8 * 1000000 + 12 * 1000000]
    assert sorted_(10, 5000, dim=0) == [(4 + 4 + 8) * 50000 + (16 + 4) * 50000 + 12 * 50000]


@row(aten.topk.default)
def test_the_largest_are_found_in_place_unless_they_are_very_many() -> None:
    """TensorTopK.cpp, `topk_out_cuda`."""
    assert taken(run(lambda: cuda(10, 100000).topk(100))) == []
    assert taken(run(lambda: cuda(100000).topk(5000))) == [5000 * (4 + 24) + 5000 * 12]


@row(aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)
def test_only_accumulating_by_index_sorts() -> None:
    """Indexing.cu, `index_put_with_sort_kernel`: indices, sorted ones, and both their positions."""

    def program(**options: Any) -> list[int]:
        return taken(run(lambda: _put(**options)))

    assert program(accumulate=False) == []
    assert program(accumulate=True) == [1000 * 32 + 1000 * 16]
    direct = run(lambda: aten._index_put_impl_(cuda(100), [_indices(50)], cuda(50), True))
    assert taken(direct) == [50 * 48]
    outside = run(lambda: aten.index_put(cuda(100), [_indices(50)], cuda(50), True))
    assert taken(outside) == [50 * 48]


def _indices(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64, device="cuda")


def _put(*, accumulate: bool) -> None:
    cuda(100, 100).index_put_((_indices(50), _indices(20, 1)), cuda(20, 50), accumulate=accumulate)


@row(aten.native_layer_norm_backward.default)
def test_a_layer_norms_weights_are_summed_in_two_passes_where_rows_are_many_and_short() -> None:
    """layer_norm_kernel.cu: more than 64 Ki rows, and less than half as many blocks of 32 columns as processors."""

    def step(rows: int, width: int, **options: Any) -> list[int]:
        return taken(run(lambda: nn.LayerNorm(width, **options).cuda()(cuda(rows, width, grad=True)).sum().backward()))

    assert step(65536, 32) == []
    assert step(70000, 32) == [2 * 4 * 32 * -(-70000 // 32)]
    assert step(70000, 96) == [2 * 4 * 96 * -(-70000 // 32)]
    assert step(70000, 32, bias=False) == [4 * 32 * -(-70000 // 32)]
    assert step(70000, 32 * 66) == []


@row(aten.native_group_norm.default, aten.native_group_norm_backward.default)
def test_a_group_norm_has_scales_and_shifts_a_channel() -> None:
    """group_norm_kernel.cu: a and b forward; ds, db and c1 a channel, c2 and c3 a group backward."""

    def step(**options: Any) -> list[int]:
        return taken(run(lambda: nn.GroupNorm(2, 8, **options).cuda()(cuda(3, 8, 5, grad=True)).sum().backward()))

    assert step() == [4 * 2 * 3 * 8, 4 * 3 * (3 * 8 + 2 * 2)]
    assert step(affine=False) == [4 * 3 * (2 * 8 + 2 * 2)]


@row(
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default, aten.binary_cross_entropy.default,
)  # fmt: skip
@pytest.mark.parametrize("loss", [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy])
def test_a_loss_has_every_value_before_it_is_reduced(loss: Callable[..., Tensor]) -> None:
    assert taken(run(lambda: loss(cuda(10, 100), cuda(10, 100)))) == [4000]
    assert taken(run(lambda: loss(cuda(10, 100), cuda(10, 100), reduction="none"))) == []


@row(aten.binary_cross_entropy_with_logits.default)
def test_a_loss_with_logits_has_its_parts() -> None:
    """Loss.cpp: log-sigmoid and loss, and with `pos_weight` one more."""
    loss = F.binary_cross_entropy_with_logits
    assert taken(run(lambda: loss(cuda(10, 100), cuda(10, 100)))) == [2 * 4000]
    assert taken(run(lambda: loss(cuda(10, 100), cuda(10, 100), reduction="none"))) == [4000]
    assert taken(run(lambda: loss(cuda(10, 100), cuda(10, 100), pos_weight=cuda(100)))) == [3 * 4000]


@row(aten.logsumexp.default)
def test_logsumexp_has_the_exponentials_of_all_values() -> None:
    assert taken(run(lambda: cuda(10, 100).logsumexp(1))) == [4000]


@row(aten._foreach_norm.Scalar)
def test_norms_of_a_list_have_a_float_a_tensor_and_chunk() -> None:
    """ForeachReduceOp.cu, `foreach_tensor_norm_cuda`; gradient clipping runs it."""

    def program() -> None:
        weights = [nn.Parameter(cuda(n)) for n in (10, 200000, 5)]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        nn.utils.clip_grad_norm_(weights, 1.0)

    assert taken(run(program)) == [4 * 3 * 4]


# --- Handles ----------------------------------------------------------------------------------------------------------


def handles(program: Callable[[], Any]) -> list[tuple[Phase, tuple[int, ...]]]:
    kept = [a for a in run(program).allocations if a.scratch is not None and a.scratch.family == "gemm_handle"]
    assert all(a.kind is TensorKind.WORKSPACE for a in kept)
    return [(a.phase, a.scratch.sizes) for a in kept]


def test_each_thread_that_multiplies_matrices_has_one_handle() -> None:
    """CublasHandlePool.cpp: a workspace a handle, and a handle a thread; CUDA's backward is a thread of its own."""

    def train() -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
        for _ in range(2):
            model(cuda(4, 8)).sum().backward()

    assert handles(train) == [(Phase.FORWARD, (0,)), (Phase.BACKWARD, (1,))]
    assert handles(lambda: nn.Linear(8, 8).cuda()(cuda(4, 8))) == [(Phase.FORWARD, (0,))]
    assert handles(lambda: nn.Conv2d(3, 8, 3).cuda()(cuda(2, 3, 9, 9)).sum().backward()) == []


def test_an_update_that_multiplies_matrices_uses_the_programs_own_handle() -> None:
    def train() -> None:
        layer = nn.Conv2d(3, 8, 3).cuda()
        optimizer = torch.optim.Adafactor(layer.parameters())
        layer(cuda(2, 3, 9, 9)).sum().backward()
        optimizer.step()

    assert handles(train) == [(Phase.UPDATE, (0,))]


def test_every_family_of_scratch_is_known_to_the_cost_model() -> None:
    sizes = {
        "conv_forward": (1,) * 11,
        "conv_backward_data": (1,) * 11,
        "conv_backward_weight": (1,) * 11,
        "sort": (8, 16),
    }
    for family in ("floats", "bytes", "gemm_handle", "lt_call", "lt_handle", *sizes):
        interval = scratch_bytes(Scratch(family, sizes.get(family, (3,)), "float32"), "8.0", Software())
        assert 0 <= interval.low <= interval.central <= interval.high
    with pytest.raises(ValueError, match="unknown scratch"):
        scratch_bytes(Scratch("other", (1,), ""), "8.0", Software())


def test_the_capability_is_that_of_the_recording() -> None:
    seen = []
    run(lambda: seen.append(attention.CAPABILITY.get()), (9, 0))
    assert seen == [(9, 0)]
    assert attention.CAPABILITY.get() == (8, 0)
