"""Trace the same kernels that eager PyTorch runs, instead of Python decompositions.

AOTAutograd traces under the Python dispatcher, where an op may have a Python kernel for the keys Autograd and
CompositeImplicitAutograd. Such a kernel replaces the op's own C++ kernel *and* its derivative: `F.interpolate` becomes
indexing and multiplications, an LSTM a loop over time steps. Sums are then taken in another order, and the last bits
differ. Here these kernels are removed while a step is traced. So the trace has the C++ kernels, which eager runs too,
and autograd's own formulas for their derivatives.

Autocast is followed as in eager too. Each cast is made once (`casts.py`), and backward is traced without autocast, as
when the user calls `loss.backward()` outside of its region.

Relies on `fx.Graph.eliminate_dead_code` reading Inductor's setting `fallback_random`.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

# registers the Python kernels
# registers more of them
from torch import Tensor, nn

from overspill.capture.fake_cuda.retarget import grouped_mm
from overspill.core.errors import UnsupportedError
from overspill.pytorch.decompositions import meta_table, mkldnn_rnn_layer, mkldnn_rnn_layer_backward
from overspill.pytorch.dispatch import (
    AutoDispatchBelowAutograd,
    DispatchKey,
    all_op_names,
    call_kernel,
    disable_current_modes,
    forget_dispatch,
    no_python_dispatcher,
    schema_of,
)
from overspill.pytorch.fake_tensors import FunctionalTensor, functional_value, op_implementations_dict
from overspill.pytorch.functorch import functorch_config
from overspill.pytorch.inductor_settings import inductor_config
from overspill.pytorch.schemas import position_of

from .casts import CAST, Casts
from .effects import checks_kept
from .strides import in_order_of, strides_kept, strides_of_kernels

aten = torch.ops.aten

KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)
"""Dispatch keys under which a Python kernel replaces an op and its derivative."""
KEPT = frozenset({
    # The C++ kernel updates its running statistics behind the schema's back, where no tracer would see it.
    "aten::native_batch_norm",
    # These compute nothing that could be rounded, and the C++ kernels look at values or cannot be traced.
    "aten::broadcast_tensors", "aten::empty", "aten::one_hot", "aten::pad_sequence", "aten::tensor_split",
    "aten::unsafe_chunk", "aten::istft",
})  # fmt: skip
"""Ops that keep their Python kernels."""

_lock = threading.RLock()
_under_way: list[Casts] = []


@contextmanager
def eager_kernels() -> Iterator[Casts]:
    """Trace eager's kernels inside the block; yield the casts of the trace.

    The caller calls `begin` of the casts when a trace begins, with the traced parameters. Not re-entered: an inner call
    joins the outer one.
    """
    with _lock:
        if _under_way:
            yield _under_way[0]
            return
        casts = Casts()
        _under_way.append(casts)
        # Kernels of our own go in, PyTorch's Python kernels out; both are undone below.
        taken = _take({CAST: {DispatchKey.CompositeImplicitAutograd: casts.cast}})
        try:
            with (
                functorch_config.patch({"backward_pass_autocast": "off"}),
                # A draw that nobody reads stays, since others then draw what they draw in eager.
                inductor_config.patch({"fallback_random": True}),
                patch.dict(op_implementations_dict, FAKE),
                patch.dict(meta_table, FAKE),  # before PyTorch's decompositions
                patch.object(nn.RNNBase, "flatten_parameters", lambda _: None),  # it looks at addresses
                casts.watched(),
                strides_kept(),
                strides_of_kernels(),
                checks_kept(),
            ):
                yield casts
        finally:
            _under_way.clear()
            for op, kernels in taken.items():
                op.py_kernels.clear()
                op.py_kernels.update(kernels)
                forget_dispatch(op)


def kernel_settings() -> tuple[bool, ...]:
    """Return PyTorch's settings that decide which kernels attention and recurrent layers are captured with."""
    backends, cuda = torch.backends, torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
        backends.mkldnn.enabled, backends.cudnn.enabled,
    )  # fmt: skip


def _take(instead: dict[Any, dict[Any, Callable[..., Any]]]) -> dict[Any, dict[Any, Any]]:
    """Remove PyTorch's Python kernels and install `instead` and REPLACED; return each op's former kernels."""
    taken = {}
    for op in dict.fromkeys((*_ops_with_python_kernels(), *REPLACED, *instead)):
        taken[op] = dict(op.py_kernels)
        for key in KEYS:
            op.py_kernels.pop(key, None)
        op.py_kernels.update(REPLACED.get(op, {}) | instead.get(op, {}))
        forget_dispatch(op)
    return taken


@cache
def _ops_with_python_kernels() -> tuple[Any, ...]:
    names = {name.split("::")[1].split(".")[0] for name in all_op_names() if name[:6] == "aten::"}
    found = []
    for name in sorted(names):
        packet = getattr(aten, name, None)
        for overload in packet.overloads() if packet is not None else ():
            op = getattr(packet, overload)
            if any(key in op.py_kernels for key in KEYS) and schema_of(op).name not in KEPT:
                found.append(op)
    return tuple(found)


def _cudnn_batch_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Run cuDNN's batch norm as the op whose schema shows its statistics updates; that op selects cuDNN again."""
    if training and running_mean is not None and running_var is not None:
        return aten._batch_norm_with_update(x, weight, bias, running_mean, running_var, momentum, eps)
    # By the key that the derivative is registered for: under AutogradCUDA there is only the fallback that has none.
    return call_kernel(
        aten.cudnn_batch_norm.default,
        DispatchKey.Autograd,
        x,
        weight,
        bias,
        running_mean,
        running_var,
        training,
        momentum,
        eps,
    )


def _dropout(x: Tensor, p: float, train: bool) -> Any:
    """Run dropout with a one-byte mask where that gives the same numbers as eager, otherwise eager's own.

    On the CPU eager divides the mask by the share that is kept, then multiplies by it, in the precision of `x`.
    """
    kept = 1.0 - p
    if (
        x.device.type == "cpu"
        and x.dtype is torch.float32
        and train
        and 0.0 < p < 1.0
        and np.float32(1.0) / np.float32(kept) == np.float32(1.0 / kept)
    ):
        return aten.native_dropout(x, p, train)[0]
    return call_kernel(aten.dropout.default, DispatchKey.CompositeImplicitAutograd, x, p, train)


NO_REST = 64
"""Row lengths that are a multiple of this fill the CPU's vectors without a rest, in any precision."""


def _sigmoid_in_rows(x: Tensor) -> Tensor:
    """Run an in-place sigmoid on rows that are not adjacent, one row at a time as in eager.

    The elements at the end of a row that do not fill a vector are rounded differently. The gates of a GRU are such
    rows, parts of longer ones. A trace captures their in-place update as a new tensor, in which they would be adjacent.
    """
    count = x.shape[-1] if x.dim() > 1 else 0
    if x.device.type == "cpu" and count % NO_REST and x.stride(-1) == 1 and x.stride(-2) > count:
        apart = aten.constant_pad_nd(x, [0, 1]).narrow(-1, 0, count)
        return x.copy_(aten.sigmoid(apart))
    with no_python_dispatcher():
        return aten.sigmoid_(x)


def _bernoulli_in_order(x: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw in place in the order of memory, as in eager.

    Dropout draws its mask so. A trace makes a new tensor, which would get the draws in the order of its elements.
    """
    if x.is_contiguous():
        with no_python_dispatcher():
            return aten.bernoulli_.float(x, p, generator=generator)
    return x.copy_(in_order_of(x, lambda shape: x.new_empty(shape).bernoulli_(p, generator=generator)))


def _recurrent(op: Any) -> Callable[..., Any]:
    """Return a function that runs the layer by its C++ kernel.

    It raises UnsupportedError for cuDNN's kernel, which cannot be traced. That kernel takes all weights as one storage,
    and keeps a dropout's state outside of PyTorch's graph.
    """

    def run(x: Tensor, *args: Any) -> Any:
        if x.device.type == "cuda" and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled:
            raise UnsupportedError(
                f"{op.overloadpacket} on CUDA runs by cuDNN, which cannot be captured; PyTorch's own kernels can: "
                "set torch.backends.cudnn.enabled = False before training"
            )
        return call_kernel(op, DispatchKey.CompositeImplicitAutograd, x, *args)

    return run


def _packed(op: Any, kernel: Callable[..., Any] | None = None) -> dict[Any, Callable[..., Any]]:
    """Return kernels that run `op` on a packed sequence, by `kernel` or by its own C++ kernel.

    The kernel reads the number of sequences at each time step. These numbers are real (`known_values.py`);
    functionalization wraps them.
    """
    position = position_of(op, "batch_sizes")
    assert position is not None
    kernel = kernel or functools.partial(call_kernel, op, DispatchKey.CompositeImplicitAutograd)

    def run(*args: Any) -> Any:
        sizes = args[position]
        if isinstance(sizes, FunctionalTensor):
            sizes = functional_value(sizes.elem)
        return kernel(*args[:position], sizes, *args[position + 1 :])

    return {DispatchKey.CompositeImplicitAutograd: run}


def _pad_packed_sequence(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int
) -> tuple[Tensor, Tensor]:
    """Return the sequences padded to one length, and their lengths.

    As in aten/src/ATen/native/PackedSequence.cpp, whose C++ writes the lengths into a tensor.
    """
    counts = batch_sizes.tolist()
    padded = data.new_full((max(total_length, len(counts)), counts[0], *data.shape[1:]), padding_value)
    # Copy times with as many sequences at once.
    time, offset = 0, 0
    for count, times in ((count, len([*same])) for count, same in itertools.groupby(counts)):
        rows = data[offset : offset + times * count].view(times, count, *data.shape[1:])
        padded[time : time + times, :count].copy_(rows)
        time, offset = time + times, offset + times * count
    lengths = [sum(count > i for count in counts) for i in range(counts[0])]
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths, device="cpu")


def _ctc_loss(log_probs: Tensor, targets: Tensor, *lengths_and_how: Any) -> Any:
    """Run CTC loss with its lengths on the device of the log probabilities.

    Otherwise PyTorch reads the lengths, which a trace cannot, or requires them on that device.
    """
    lengths = (length.to(log_probs.device) for length in lengths_and_how[:2])
    op = aten.ctc_loss.Tensor
    return call_kernel(op, DispatchKey.CompositeImplicitAutograd, log_probs, targets, *lengths, *lengths_and_how[2:])


RECURRENT = (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu)
REPLACED: dict[Any, dict[Any, Callable[..., Any]]] = {
    **{layer.input: {DispatchKey.CompositeImplicitAutograd: _recurrent(layer.input)} for layer in RECURRENT},
    **{layer.data: _packed(layer.data, _recurrent(layer.data)) for layer in RECURRENT},
    aten._pad_packed_sequence.default: _packed(aten._pad_packed_sequence.default, _pad_packed_sequence),
    aten._pack_padded_sequence_backward.default: _packed(aten._pack_padded_sequence_backward.default),
    aten.ctc_loss.Tensor: {DispatchKey.CompositeImplicitAutograd: _ctc_loss},
    aten.cudnn_batch_norm.default: {DispatchKey.Autograd: _cudnn_batch_norm},
    aten.dropout.default: dict.fromkeys(KEYS, _dropout),
    aten.bernoulli_.float: {DispatchKey.Autograd: _bernoulli_in_order},
    aten.sigmoid_.default: {DispatchKey.Autograd: _sigmoid_in_rows},
}
"""Python kernels of our own, by op and dispatch key."""


# -- recurrent layers of oneDNN


def run_with_gradients(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `op` to run below autograd with grad mode on, as in eager."""

    def run(*args: Any) -> Any:
        with AutoDispatchBelowAutograd(), torch.enable_grad():
            return op(*args)

    run.__name__ = str(op)
    return run


RUN_AS = {aten.mkldnn_rnn_layer.default: run_with_gradients(aten.mkldnn_rnn_layer.default)}
"""Ops that save tensors for backward only with grad mode on, and their wrapped versions."""


def _fake_rnn_layer(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run oneDNN's RNN layer on fake tensors, with a workspace of the real size; PyTorch's own is empty."""
    with mode:
        x, *_ = args
        output, hidden, cell, workspace = mkldnn_rnn_layer(*args, **kwargs)
        if args[-1] and x.device.type == "cpu":
            described = tuple(
                (tuple(a.shape), tuple(a.stride()), a.dtype) if isinstance(a, Tensor) else _plain(a) for a in args
            )
            workspace = torch.empty(_workspace_bytes(op, described), dtype=torch.uint8, device=x.device)
    return output, hidden, cell, workspace


def _plain(argument: Any) -> Any:
    return tuple(argument) if isinstance(argument, list) else argument


@cache
def _workspace_bytes(op: Any, described: tuple[Any, ...]) -> int:
    """Return the bytes of the workspace that the layer saves for backward.

    Only oneDNN knows them, so the layer is run once, on zeros.
    """
    with disable_current_modes(), no_python_dispatcher():
        args = [
            torch.empty_strided(a[0], a[1], dtype=a[2], device="cpu").zero_()
            if isinstance(a, tuple) and a and isinstance(a[-1], torch.dtype)
            else (list(a) if isinstance(a, tuple) else a)
            for a in described
        ]
        return int(RUN_AS[op](*args)[3].numel())


def _fake_rnn_layer_backward(mode: Any, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Return fake gradients of oneDNN's RNN layer, in float32 for any precision, each in memory of its own.

    PyTorch's meta function gives them the layer's precision up to 2.12, and both biases share one memory. Results from
    the cache of fake tensors share nothing, so the same step captured again would have another floor.
    """
    with mode:
        found = mkldnn_rnn_layer_backward(*args, **kwargs)
        return tuple(torch.empty_like(gradient, dtype=torch.float32) for gradient in found)


def _fake_loss_backward(mode: Any, _: Any, __: Tensor, x: Tensor, target: Tensor, *___: Any, **____: Any) -> Tensor:
    """Return the fake gradient of a mean of differences.

    PyTorch's own divides by the number of elements, which may be zero.
    """
    with mode:
        return torch.empty_like(x - target)


FAKE: dict[Any, Callable[..., Any]] = {
    aten.huber_loss_backward.default: _fake_loss_backward,
    aten.mse_loss_backward.default: _fake_loss_backward,
    aten.smooth_l1_loss_backward.default: _fake_loss_backward,
    aten.mkldnn_rnn_layer.default: _fake_rnn_layer,
    aten.mkldnn_rnn_layer_backward.default: _fake_rnn_layer_backward,
}
"""Fake implementations of our own, by op."""


def _fake_grouped_mm(mode: Any, _: Any, *args: Any, **kwargs: Any) -> Tensor:
    with mode:
        return grouped_mm(*args, **kwargs)


# For Dynamo too, from now on: PyTorch's own refuses all precisions but bfloat16, though the kernels have others.
op_implementations_dict[aten._grouped_mm.default] = _fake_grouped_mm
