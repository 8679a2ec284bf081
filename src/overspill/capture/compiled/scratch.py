"""Find the scratch memory of ops: bytes that their kernels use besides their results.

Some C++ kernels make their result in a larger buffer, and keep that. Tracing does not show it. A mean or sum of losses
would keep the bytes of all losses while it lives, so a captured step copies it out. Other results count as large as
their buffer.

On CUDA, kernels and libraries need workspaces while they run. `capture/fake_cuda` knows their sizes, except for cuDNN,
which chooses among its engines by its own rules. On a GPU that this machine has, each call of cuDNN is run once.

On the CPU, oneDNN takes scratch by rules of its own for each processor, norms copy what is not contiguous, and an op of
two dtypes casts one. So there each op that may take scratch is run once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from overspill.capture.fake_cuda.attention import CAPABILITY
from overspill.capture.fake_cuda.retarget import SCRATCH
from overspill.capture.programs.workspaces import NO_WORKSPACE, CallWorkspace, workspaces_of
from overspill.costs.scratch import Scratch, Software, room_bytes
from overspill.costs.scratch import scratch_bytes as library_bytes
from overspill.pytorch.dispatch import OpOverload
from overspill.pytorch.schemas import arguments, node_argument
from overspill.pytorch.trees import tree_leaves

from .joint import has_fakes

aten = torch.ops.aten

LOSSES = frozenset({
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
    aten.binary_cross_entropy.default,
})  # fmt: skip
"""Ops that reduce element losses within their own storage (PyTorch 2.13, aten/src/ATen/native/Loss.cpp)."""
CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})
ATTENTION_OF_CUDNN = frozenset({
    aten._scaled_dot_product_cudnn_attention.default, aten._scaled_dot_product_cudnn_attention_backward.default,
})  # fmt: skip
"""cuDNN's attention, which PyTorch takes for half precision on Hopper."""
AS_LARGE_AS_INPUT = frozenset({aten.im2col.default, aten.col2im.default})
"""Ops that resize a tensor like their input (PyTorch 2.13, aten/src/ATen/native/Im2Col.cpp, Col2Im.cpp)."""


def _of_safe_softmax(x: Tensor, dim: int, *_: Any) -> int:
    rows = x.numel() // max(1, x.shape[dim])
    return x.numel() + rows + 8 + (0 if x.is_contiguous() else x.nbytes)


def _of_attention(q: Tensor, k: Tensor, *, backward: bool = False) -> int:
    """Return the bytes that attention's blocks of rows and columns take, one block a thread.

    Half precision has each block twice.
    """
    rows = min(q.shape[-2], 256 if q.shape[-2] >= 768 else 64 if q.shape[-2] >= 192 else 32)
    inside = max(4, q.itemsize)
    block = rows * min(k.shape[-2], 512) * (inside + (q.itemsize if q.itemsize < inside else 0))
    each = 2 * block + rows * inside if backward else block + rows * inside * (2 + q.shape[-1])
    return torch.get_num_threads() * each + (q.nbytes if backward else 0)


TAKEN_ON_CPU: dict[Any, Callable[..., int]] = {
    **dict.fromkeys((aten.native_dropout.default, aten.native_dropout_backward.default), lambda x, *_: x.nbytes + 16),
    aten._safe_softmax.default: _of_safe_softmax,
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda q, k, *_: _of_attention(q, k),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default:
        lambda _, q, k, *__: _of_attention(q, k, backward=True),
}  # fmt: skip
"""Bytes of scratch on the CPU, by op; they need not be measured.

A dropout casts its mask to the dtype of what it multiplies. Attention's softmax looks for rows that are masked whole. A
few bytes are scalars. (PyTorch 2.13, aten/src/ATen/native/Dropout.cpp, SoftMax.cpp, cpu/FlashAttentionKernel.cpp)
"""


def _of_4bit_product(x: Tensor, _packed: Tensor, shape: Sequence[int], *rest: Any) -> int:
    scales = rest[4] if len(rest) > 4 else None  # quantised scales are dequantised first
    return prod(shape) * x.itemsize + (0 if scales is None else 4 * scales.numel())


TAKEN_BY_LIBRARIES: dict[str, Callable[..., int]] = {"bitsandbytes.gemm_4bit.default": _of_4bit_product}
"""Bytes of scratch on any device, by the name of an op of a library.

A product with a weight of 4 bits dequantises it whole, on CUDA except for few rows. On the CPU it is measured, for the
product takes scratch too. (bitsandbytes 0.50.2,
backends/default/ops.py, `_gemm_4bit_default_impl`, and backends/cuda/ops.py)
"""


MATRICES = frozenset({aten.mm.default, aten.addmm.default})
"""Products that take no scratch on the CPU in single or double precision, of matrices that need no copy."""
MEASURED = frozenset({"aten", "bitsandbytes", "prims", "torchao", "quanto"})
"""Namespaces of ops that may be run to be measured: others may do more than compute."""
_NUMBER = CallWorkspace(16)
"""A number in an op of elements is made a tensor, then one of the op's dtype."""


def reduces_in_place(node: fx.Node) -> bool:
    """Return whether `node` is one of LOSSES with a reduction (mean or sum)."""
    return node.target in LOSSES and node.meta["val"].dim() == 0


def scratch_of(node: fx.Node) -> CallWorkspace:
    """Return the workspace that `node` takes while it runs, besides its results.

    For reduced LOSSES on the CPU these are also the losses of all elements.
    """
    where = _device_of(node)
    if (formula := _formula(node, where)) is not None:
        return _by(formula, node)
    if where.type == "cuda":
        if _is_cudnns(node) and (measured := workspaces_of([node])) is not None:
            return measured[0]
        return _most(node, torch.cuda.get_device_capability(where), room_bytes)
    if capability := CAPABILITY.get():
        return _most(node, capability, lambda *request: library_bytes(*request).central)
    taken = _on_cpu(node)
    if not reduces_in_place(node):
        return taken
    shapes = (n.meta["val"].shape for n in node.all_input_nodes[:2])  # its result is copied out of the losses
    return CallWorkspace(taken.nbytes + prod(torch.broadcast_shapes(*shapes)) * node.meta["val"].element_size())


def _formula(node: fx.Node, where: torch.device) -> Callable[..., int] | None:
    """Return the function that works out the scratch of a call, if one is known."""
    if where.type == "cpu" and not CAPABILITY.get():
        return TAKEN_ON_CPU.get(node.target)
    return TAKEN_BY_LIBRARIES.get(str(node.target))


def _on_cpu(node: fx.Node) -> CallWorkspace:
    """Return the scratch of a call on the CPU, which is run once if it may take more than a few bytes."""
    if not isinstance(node.target, OpOverload) or node.target.namespace not in MEASURED:
        return NO_WORKSPACE
    if not has_fakes(node):
        return NO_WORKSPACE
    values = [v for v in tree_leaves([n.meta["val"] for n in (*node.all_input_nodes, node)]) if isinstance(v, Tensor)]
    dtypes = {value.dtype for value in values}
    wide = dtypes <= {torch.float32, torch.float64}
    if torch.Tag.pointwise in node.target.tags and len(dtypes) < 2:
        return _NUMBER if any(type(a) in (int, float) for a in node.args) else NO_WORKSPACE
    if node.target in MATRICES and wide and all(1 in v.stride() for v in values):
        return NO_WORKSPACE
    if (measured := workspaces_of([node])) is not None:
        return measured[0]
    formula = TAKEN_BY_LIBRARIES.get(str(node.target))
    return NO_WORKSPACE if formula is None else _by(formula, node)


def _by(formula: Callable[..., int], node: fx.Node) -> CallWorkspace:
    return CallWorkspace(formula(*fx.node.map_arg(node.args, lambda n: n.meta["val"])))


def measure(nodes: Iterable[fx.Node]) -> None:
    """Run each call of cuDNN among `nodes` once, if this machine has the GPU; `scratch_of` then knows their bytes."""
    if found := [n for n in nodes if _is_cudnns(n) and _device_of(n).type == "cuda"]:
        workspaces_of(found)


def _is_cudnns(node: fx.Node) -> bool:
    """Return whether `node` is a convolution, or cuDNN's attention without random draws."""
    quiet = node.target in ATTENTION_OF_CUDNN and not node_argument(node, "dropout_p")
    return node.target in CONVOLUTIONS or quiet


def _most(node: fx.Node, capability: tuple[int, int], taken: Callable[[Scratch, str, Software], int]) -> CallWorkspace:
    """Return the scratch of `node` on a GPU of this capability.

    For a convolution it has the blocks that are taken in turn; for others, only the largest.
    """
    if (wanted := SCRATCH.get(node.target)) is None:
        return NO_WORKSPACE
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: n.meta["val"])
    software = Software(torch.__version__)
    scratch = (request for _, request in wanted(arguments(node.target, args, kwargs), node.meta["val"]))
    blocks = tuple(taken(request, "{}.{}".format(*capability), software) for request in scratch)
    return CallWorkspace(max(blocks, default=0), blocks if node.target in CONVOLUTIONS else ())


def _device_of(node: fx.Node) -> torch.device:
    found = (v for v in tree_leaves(node.meta.get("val")) if isinstance(v, Tensor))
    return next((value.device for value in found), torch.device("cpu"))
