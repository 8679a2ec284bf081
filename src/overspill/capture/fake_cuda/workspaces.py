# ruff: noqa: ARG001 - all functions take what a dispatched op has
"""Scratch memory of CUDA kernels beyond their outputs, as far as tensor sizes decide it.

Each function gets an op's arguments by their names in its schema, and its result. It returns the scratch that is taken
and given back, each with the position of the output after which this happens.
"""

from __future__ import annotations

from contextvars import ContextVar
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from overspill.costs.scratch import Scratch
from overspill.pytorch.schemas import Arguments

Wanted = list[tuple[int, Scratch]]
LAST = 1 << 30
"""The position that is after all outputs."""
TRIED: ContextVar[set[tuple[Any, ...]]] = ContextVar("tried")
"""Convolutions for which cuDNN has tried its engines, with torch.backends.cudnn.benchmark set."""
_LONG = 8  # bytes of an int64, CUDA's usual index


def of_bytes(position: int, nbytes: int) -> Wanted:
    """Return `nbytes` of scratch, taken and given back after the output at `position`."""
    return [(position, Scratch("bytes", (nbytes,), ""))] if nbytes > 0 else []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- Convolutions -----------------------------------------------------------------------------------------------------


def _channels_last(x: Tensor) -> bool:
    return (
        x.dim() in {4, 5}
        and x.is_contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
        and not x.is_contiguous()
    )


def _conv_sizes(x: Tensor, w: Tensor, y: Tensor, stride: Any, groups: int, transposed: bool) -> tuple[int, ...]:
    """Return the sizes of a convolution that `costs.scratch` needs, in the order of its `Convolution`."""
    if transposed:
        x, y = y, x
    channels_in = x.shape[1]
    return (
        x.numel(), w.numel(), y.numel(), x.shape[0], channels_in, y.shape[1], groups, prod(w.shape[2:]),
        max(stride, default=1), int(_channels_last(x) or _channels_last(w)), len(w.shape) - 2,
    )  # fmt: skip


def _workspaces(family: str, sizes: tuple[int, ...], x: Tensor, position: int) -> Wanted:
    """Return a convolution's workspace during the call (aten/src/ATen/native/cudnn/Conv_v8.cpp, `run_conv_plan`).

    With benchmark on, `get_plans_from_find` first runs all engines on new sizes, in a workspace for the largest. Here
    that is copies of input, weight and output, the most that an engine is known to take.
    """
    wanted = [(position, Scratch(family, sizes, _name(x.dtype)))]
    key = (family, sizes, x.dtype)
    own_kernel = sizes[6] == sizes[4] > 1 and x.dtype is torch.float32  # depthwise: PyTorch's, not cuDNN's
    if not torch.backends.cudnn.benchmark or own_kernel or key in TRIED.get():
        return wanted
    TRIED.get().add(key)
    return [(position, Scratch("conv_trial", (sum(sizes[:3]) * x.element_size(),), "")), *wanted]


def convolution(given: Arguments, result: Tensor) -> Wanted:
    """Return the workspace of a convolution; with benchmark on, first one for trials of new sizes."""
    x, w, transposed = given["input"], given["weight"], given["transposed"]
    family = "conv_backward_data" if transposed else "conv_forward"
    return _workspaces(family, _conv_sizes(x, w, result, given["stride"], given["groups"], transposed), x, 0)


def convolution_backward(given: Arguments, result: Any) -> Wanted:
    """Return the workspaces for the gradient of the input, then of the weight."""
    x, transposed, mask = given["input"], given["transposed"], given["output_mask"]
    sizes = _conv_sizes(x, given["weight"], given["grad_output"], given["stride"], given["groups"], transposed)
    families = ("conv_forward" if transposed else "conv_backward_data", "conv_backward_weight")
    return [
        workspace
        for position, family, wanted in zip((0, int(mask[0])), families, mask[:2], strict=True)
        if wanted
        for workspace in _workspaces(family, sizes, x, position)
    ]


# --- Sorting and indexing ---------------------------------------------------------------------------------------------


def _sorted(pairs: int, item: int, besides: int) -> Wanted:
    """Return the scratch of cub::DeviceRadixSort: a copy of `pairs` keys of `item` bytes and int64 values."""
    return [(LAST, Scratch("sort", (besides, pairs * (item + _LONG)), ""))]


def sort(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of sort.

    cuda/Sort.cpp, `sort_cuda_kernel`; SortStable.cu, `do_launch_stable_sort_kernel`.
    """
    x, dim = given["self"], given["dim"]
    length = x.shape[dim] if x.dim() else 1
    if length <= 4096:  # should_use_small_sort: in place, in the outputs
        return of_bytes(LAST, length * _LONG)
    segments, item = x.numel() // length, x.element_size()
    moved = 0 if x.stride(dim) == 1 else x.numel() * (2 * item + _LONG)  # input and both outputs with dim innermost
    if segments == 1 or length >= 1_000_000:
        return _sorted(length, item, moved + length * _LONG)
    if segments < 128:  # sorted as a whole, then by segment: positions twice, and the keys once
        return _sorted(x.numel(), item, moved + x.numel() * (2 * _LONG + item))
    return _sorted(x.numel(), item, moved + x.numel() * _LONG)


def topk(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of topk, only for k above 4096, when it sorts (cuda/TensorTopK.cpp, `topk_out_cuda`)."""
    values = result[0]
    if given["k"] <= 4096:
        return []
    return _sorted(values.numel(), values.element_size(), values.numel() * (values.element_size() + 3 * _LONG))


def index_put(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of accumulating index_put: sorted linear indices.

    cuda/Indexing.cu, `index_put_with_sort_kernel`.
    """
    indices = [index for index in given["indices"] if isinstance(index, Tensor)]
    if not given["accumulate"] or not indices:
        return []
    pairs = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    return _sorted(pairs, _LONG, 4 * pairs * _LONG)


def embedding_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of an embedding's gradient; few indices need none (cuda/Embedding.cu)."""
    indices = given["indices"].numel()
    if indices <= 3072 and not given["scale_grad_by_freq"]:
        return []
    return _sums_of_rows(indices, given["grad_output"].shape[-1], result.shape[0])


def embedding_bag_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of an embedding bag's gradient, as an embedding's (cuda/EmbeddingBag.cu)."""
    if given["mode"] == 2:
        return []
    return _sums_of_rows(given["indices"].numel(), given["grad"].shape[-1], result.shape[0])


def _sums_of_rows(indices: int, width: int, rows: int) -> Wanted:
    """Return the scratch of summing gradients of equal indices.

    EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`: sorted indices, their positions and the starts of runs
    of equal ones. Then a float row for each run, and one more for each further NROWS_PER_THREAD = 10 indices. The
    kernel allocates the largest possible number of rows, so that it does not wait for the count.
    """
    runs = min(indices, rows)
    parts = indices // 10 + runs
    indexing = _LONG * max(5 * indices, 3 * indices + 2 * runs + parts)  # sorting has cub's copies, summing the runs
    return [*of_bytes(LAST, indexing), *of_bytes(LAST, 4 * width * parts)]


# --- Normalisation ----------------------------------------------------------------------------------------------------


def layer_norm_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of layer norm's weight gradients.

    cuda/layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`. Only if rows are very many and short are they summed
    in two passes: one row of each in 32.
    """
    return _sums_of_blocks(given["input"], prod(given["normalized_shape"]), sum(given["output_mask"][1:]))


def rms_norm_backward(given: Arguments, result: Any) -> Wanted:
    """Return the scratch of RMS norm's weight gradient, as layer norm's."""
    return _sums_of_blocks(given["input"], prod(given["normalized_shape"]), int(given["output_mask"][1]))


def _sums_of_blocks(x: Tensor, width: int, weights: int) -> Wanted:
    rows = x.numel() // max(width, 1)
    columns = -(-width // 32)
    if rows <= 64 * 1024 or columns >= 66:  # half of the multiprocessors of a large GPU
        return []
    return of_bytes(LAST, weights * min(32 * 1024 // columns, -(-rows // 32)) * width * x.element_size())


def group_norm(given: Arguments, result: Any) -> Wanted:
    """Return a float scale and shift for each sample and channel (cuda/group_norm_kernel.cu)."""
    x = given["input"]
    if given["weight"] is None and given["bias"] is None:
        return []
    return of_bytes(LAST, 4 * 2 * x.shape[0] * x.shape[1])


def group_norm_backward(given: Arguments, result: Any) -> Wanted:
    """Return floats ds, db, c1 a channel and c2, c3 a group.

    group_norm_kernel.cu, `GroupNormBackwardKernelImplInternal`.
    """
    x, group, mask = given["input"], given["group"], given["output_mask"]
    per_channel = 2 + int(bool(mask[0]) and given["weight"] is not None)
    return of_bytes(LAST, 4 * x.shape[0] * (per_channel * x.shape[1] + 2 * group * int(mask[0])))


# --- Losses and reductions --------------------------------------------------------------------------------------------


def reduced_loss(given: Arguments, result: Tensor) -> Wanted:
    """Return the loss of every element, before the reduction (aten/src/ATen/native/Loss.cpp and cuda/Loss.cu)."""
    x = given["self"]
    return of_bytes(0, x.numel() * x.element_size()) if result.dim() == 0 < x.dim() else []


def loss_with_logits(given: Arguments, result: Tensor) -> Wanted:
    """Return the temporaries of `binary_cross_entropy_with_logits` (aten/src/ATen/native/Loss.cpp).

    They are log-sigmoid, the weight of positive targets, and the loss of every element.
    """
    x = given["self"]
    parts = 1 + int(given["pos_weight"] is not None) + int(result.dim() == 0 < x.dim())
    return of_bytes(0, parts * x.numel() * x.element_size())


_FEW_VALUES = 256
"""The number of values a thread from which blocks share a sum: `max_values_per_thread`."""


def reduction(given: Arguments, result: Tensor) -> Wanted:
    """Return partial sums and counters of blocks that share a sum.

    aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig` and `global_memory_size`. For a matrix's columns that can be
    more than the matrix.
    """
    x, count = given["self"], max(result.numel(), 1)
    if x.numel() <= count:
        return []
    item = 8 if x.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    inputs, wide = x.numel() // count, 1  # elements of a sum, and sums that a thread adds up side by side
    # How threads of a block are laid out: along the sum, or along the outputs.
    reduced, kept = _strides(x, given.get("dim"))
    along = not kept or min(reduced, default=(1, 1)) < min(kept)  # the dimension that is next in memory is summed up
    width, height = (inputs, count) if along else (count, inputs)
    if not along and min(kept)[0] == 1:
        wide = gcd(4, min(kept)[1], *(stride for stride, _ in (*reduced, *sorted(kept)[1:])))
        width //= wide
    elif along and not kept and len(reduced) == 1 and width > 128 and reduced[0][0] == 1:
        width //= 4
    most = 512 // wide
    across, down = (_power(min(n, most)) for n in (width, height))
    down_now = min(down, most // min(across, 32))
    across, down = min(across, most // down_now), down_now
    # Few values a thread need no scratch.
    step = across if along else 1
    a_thread = -(-inputs // step)
    if a_thread < min(down * 16, _FEW_VALUES):
        return []
    a_thread = -(-inputs // (step * down))
    if a_thread < _FEW_VALUES:
        return []
    # A part of each output for each block.
    grid = -(-(count // wide) // (1 if along else across))
    a_block = item * count * (1 if along else across * wide)
    sizes = (a_block, across * down, grid, a_thread)  # over how many blocks it is spread depends on the GPU
    return [(0, Scratch("sum_parts", sizes, "")), (0, Scratch("sum_counts", sizes, ""))]


def _strides(x: Tensor, dims: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return strides and sizes of reduced and of kept dimensions; adjacent dimensions are merged."""
    given = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {d % max(x.dim(), 1) for d in given}
    found: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    for stride, dim in sorted((x.stride(d), d) for d in range(x.dim()) if x.shape[d] > 1):
        part = found[dim not in gone]
        if part and part[-1][0] * part[-1][1] == stride:
            part[-1] = part[-1][0], part[-1][1] * x.shape[dim]
        else:
            part.append((stride, x.shape[dim]))
    return found


def _power(n: int) -> int:
    """Return the largest power of two up to `n`."""
    return 1 << (max(n, 1).bit_length() - 1)


def logsumexp(given: Arguments, result: Tensor) -> Wanted:
    """Return the exponentials of the whole input (aten/src/ATen/native/ReduceOps.cpp, `logsumexp_out_impl`)."""
    return of_bytes(0, given["self"].numel() * given["self"].element_size())


def foreach_norm(given: Arguments, result: Any) -> Wanted:
    """Return a float for each tensor and chunk of 65536 (cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`)."""
    longest = max((tensor.numel() for tensor in given["self"]), default=0)
    return of_bytes(LAST, 4 * len(given["self"]) * -(-longest // 65536))
