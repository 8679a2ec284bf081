# ruff: noqa: ARG001 - all functions take what a dispatched op has
"""What CUDA kernels take besides their outputs, op by op, as far as the sizes of tensors decide it.

Each function gets an op's arguments and result, and returns after which output which scratch is taken and given back;
position 9 stands for after all of them.
"""

from __future__ import annotations

from contextvars import ContextVar
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor

from overspill.costs.scratch import Scratch

Wanted = list[tuple[int, Scratch]]
_LAST = 9
# The convolutions that cuDNN has tried its engines on, where torch.backends.cudnn.benchmark is set.
TRIED: ContextVar[set[tuple[Any, ...]]] = ContextVar("tried")
_LONG = 8  # bytes of an int64, CUDA's usual index


def _bytes(position: int, nbytes: int) -> Wanted:
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
    """What `costs.scratch` wants to know of a convolution, in the order of its `Convolution`."""
    if transposed:
        x, y = y, x
    channels_in = x.shape[1]
    return (
        x.numel(), w.numel(), y.numel(), x.shape[0], channels_in, y.shape[1], groups, prod(w.shape[2:]),
        max(stride, default=1), int(_channels_last(x) or _channels_last(w)), len(w.shape) - 2,
    )  # fmt: skip


def _workspaces(family: str, sizes: tuple[int, ...], x: Tensor, position: int) -> Wanted:
    """aten/src/ATen/native/cudnn/Conv_v8.cpp, `run_conv_plan`: a workspace for the time of the call.

    With benchmark on, `get_plans_from_find` first runs all engines on sizes that are new, in a workspace for the largest:
    here copies of input, weight and output, the most that an engine is known to take.
    """
    wanted = [(position, Scratch(family, sizes, _name(x.dtype)))]
    key = (family, sizes, x.dtype)
    own_kernel = sizes[6] == sizes[4] > 1 and x.dtype is torch.float32  # depthwise: PyTorch's, not cuDNN's
    if not torch.backends.cudnn.benchmark or own_kernel or key in TRIED.get():
        return wanted
    TRIED.get().add(key)
    return [(position, Scratch("conv_trial", (sum(sizes[:3]) * x.element_size(),), "")), *wanted]


def convolution(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """A workspace; before that of the first of its sizes, perhaps one for trials."""
    x, w, _, stride, _, _, transposed, _, groups = args
    family = "conv_backward_data" if transposed else "conv_forward"
    return _workspaces(family, _conv_sizes(x, w, result, stride, groups, transposed), x, 0)


def convolution_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """As forward; the gradient of the input first, then that of the weight, each with its own workspace."""
    dy, x, w, _, stride, _, _, transposed, _, groups, mask = args
    sizes = _conv_sizes(x, w, dy, stride, groups, transposed)
    families = ("conv_forward" if transposed else "conv_backward_data", "conv_backward_weight")
    return [
        workspace
        for position, family, wanted in zip((0, int(mask[0])), families, mask[:2], strict=True)
        if wanted
        for workspace in _workspaces(family, sizes, x, position)
    ]


# --- Sorting and indexing ---------------------------------------------------------------------------------------------


def _sorted(pairs: int, item: int, besides: int) -> Wanted:
    """cub::DeviceRadixSort of `pairs` keys of `item` bytes with int64 values, which takes both once more."""
    return [(_LAST, Scratch("sort", (besides, pairs * (item + _LONG)), ""))]


def sort(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Sort.cpp, `sort_cuda_kernel`; SortStable.cu, `do_launch_stable_sort_kernel`."""
    x = args[0]
    dim = _sort_dim(args, kwargs, position=2 if kwargs.get("stable") is None and isinstance(args[-1], bool) else 1)
    length = x.shape[dim] if x.dim() else 1
    if length <= 4096:  # should_use_small_sort: in place, in the outputs
        return _bytes(_LAST, length * _LONG)
    segments, item = x.numel() // length, x.element_size()
    moved = 0 if x.stride(dim) == 1 else x.numel() * (2 * item + _LONG)  # input and both outputs with dim innermost
    if segments == 1 or length >= 1_000_000:
        return _sorted(length, item, moved + length * _LONG)
    if segments < 128:  # sorted as a whole, then by segment: positions twice, and the keys once
        return _sorted(x.numel(), item, moved + x.numel() * (2 * _LONG + item))
    return _sorted(x.numel(), item, moved + x.numel() * _LONG)


def _sort_dim(args: Any, kwargs: Any, position: int) -> int:
    if "dim" in kwargs:
        return int(kwargs["dim"])
    found = [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    return found[0] if found else -1


def topk(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/TensorTopK.cpp, `topk_out_cuda`: only results longer than 4096 are sorted elsewhere."""
    values, k = result[0], args[1]
    if k <= 4096:
        return []
    return _sorted(values.numel(), values.element_size(), values.numel() * (values.element_size() + 3 * _LONG))


def index_put(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Indexing.cu, `index_put_with_sort_kernel`: linear indices, sorted with positions."""
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    accumulate = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if not accumulate or not indices:
        return []
    pairs = torch.broadcast_shapes(*(index.shape for index in indices)).numel()
    return _sorted(pairs, _LONG, 4 * pairs * _LONG)


def embedding_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/Embedding.cu, `embedding_dense_backward_cuda`: few indices need nothing."""
    grad, indices = args[0], args[1]
    by_frequency = args[4] if len(args) > 4 else kwargs.get("scale_grad_by_freq", False)
    if indices.numel() <= 3072 and not by_frequency:
        return []
    return _sums_of_rows(indices.numel(), grad.shape[-1], result.shape[0])


def embedding_bag_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/EmbeddingBag.cu, `embedding_bag_backward_cuda_sum_avg`: as an embedding's."""
    grad, indices, mode = args[0], args[1], args[8]
    return [] if mode == 2 else _sums_of_rows(indices.numel(), grad.shape[-1], result.shape[0])


def _sums_of_rows(indices: int, width: int, rows: int) -> Wanted:
    """aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu, `embedding_backward_cuda_kernel`.

    Sorted indices, their positions and where runs of equal ones begin; then a float row for each run, and one more for
    each further NROWS_PER_THREAD = 10 indices. It asks for the most that there can be, so as not to wait for the count.
    """
    runs = min(indices, rows)
    parts = indices // 10 + runs
    indexing = _LONG * max(5 * indices, 3 * indices + 2 * runs + parts)  # sorting has cub's copies, summing the runs
    return [*_bytes(_LAST, indexing), *_bytes(_LAST, 4 * width * parts)]


# --- Normalisation ----------------------------------------------------------------------------------------------------


def layer_norm_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/layer_norm_kernel.cu, `LaunchGammaBetaBackwardCUDAKernel`.

    Only where rows are very many and short are the weights' gradients summed in two passes: one row of each in 32.
    """
    x, shape, mask = args[1], args[2], args[7]
    return _sums_of_blocks(x, prod(shape), sum(mask[1:]))


def rms_norm_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """As layer_norm's, for one weight."""
    return _sums_of_blocks(args[1], prod(args[2]), int(args[5][1]))


def _sums_of_blocks(x: Tensor, width: int, weights: int) -> Wanted:
    rows = x.numel() // max(width, 1)
    columns = -(-width // 32)
    if rows <= 64 * 1024 or columns >= 66:  # half of the multiprocessors of a large GPU
        return []
    return _bytes(_LAST, weights * min(32 * 1024 // columns, -(-rows // 32)) * width * x.element_size())


def group_norm(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/group_norm_kernel.cu: a scale and a shift a sample and channel, in float."""
    x, weight, bias = args[0], args[1], args[2]
    if weight is None and bias is None:
        return []
    return _bytes(_LAST, 4 * 2 * x.shape[0] * x.shape[1])


def group_norm_backward(args: Any, kwargs: Any, result: Any) -> Wanted:
    """group_norm_kernel.cu, `GroupNormBackwardKernelImplInternal`: ds, db and c1 a channel, c2 and c3 a group."""
    x, weight, group, mask = args[1], args[4], args[8], args[9]
    per_channel = 2 + int(bool(mask[0]) and weight is not None)
    return _bytes(_LAST, 4 * x.shape[0] * (per_channel * x.shape[1] + 2 * group * int(mask[0])))


# --- Losses and reductions --------------------------------------------------------------------------------------------


def reduced_loss(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """aten/src/ATen/native/Loss.cpp and cuda/Loss.cu: the loss of every value, before it is reduced."""
    return _bytes(0, args[0].numel() * args[0].element_size()) if result.dim() == 0 < args[0].dim() else []


def loss_with_logits(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """aten/src/ATen/native/Loss.cpp, `binary_cross_entropy_with_logits`: log-sigmoid, the weight of positive targets,
    and the loss of every value.
    """
    weighted = (len(args) > 3 and args[3] is not None) or kwargs.get("pos_weight") is not None
    parts = 1 + int(weighted) + int(result.dim() == 0 < args[0].dim())
    return _bytes(0, parts * args[0].numel() * args[0].element_size())


_FEW_VALUES = 256
"""As many values or more a thread, and a sum is shared by blocks: `max_values_per_thread`."""


def reduction(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig` and `global_memory_size`: what blocks have for one another that
    share a sum, and a count of them. Of a matrix's columns that can be more than the matrix.
    """
    x, count = args[0], max(result.numel(), 1)
    if x.numel() <= count:
        return []
    item = 8 if x.dtype in (torch.float64, torch.int64, torch.int32, torch.bool) else 4
    inputs, wide = x.numel() // count, 1  # elements of a sum, and sums that a thread adds up side by side
    reduced, kept = _strides(x, args[1] if len(args) > 1 else None)
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
    step = across if along else 1
    a_thread = -(-inputs // step)
    if a_thread < min(down * 16, _FEW_VALUES):
        return []
    a_thread = -(-inputs // (step * down))
    if a_thread < _FEW_VALUES:
        return []
    grid = -(-(count // wide) // (1 if along else across))
    a_block = item * count * (1 if along else across * wide)
    sizes = (a_block, across * down, grid, a_thread)  # over how many blocks it is spread depends on the GPU
    return [(0, Scratch("sum_parts", sizes, "")), (0, Scratch("sum_counts", sizes, ""))]


def _strides(x: Tensor, dims: Any) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Strides and sizes of the dimensions that are reduced, and of those that are kept; neighbours in memory are one."""
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
    """The largest power of two that is not above `n`."""
    return 1 << (max(n, 1).bit_length() - 1)


def logsumexp(args: Any, kwargs: Any, result: Tensor) -> Wanted:
    """aten/src/ATen/native/ReduceOps.cpp, `logsumexp_out_impl`: the exponentials of the whole input."""
    return _bytes(0, args[0].numel() * args[0].element_size())


def foreach_norm(args: Any, kwargs: Any, result: Any) -> Wanted:
    """aten/src/ATen/native/cuda/ForeachReduceOp.cu, `foreach_tensor_norm_cuda`: a float a tensor and chunk of 65536."""
    longest = max((tensor.numel() for tensor in args[0]), default=0)
    return _bytes(_LAST, 4 * len(args[0]) * -(-longest // 65536))
