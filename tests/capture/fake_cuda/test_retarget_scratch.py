"""The memory that CUDA's kernels take while they run, as PyTorch's sources have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.fake_cuda.retargeting import F, aten, cuda, row, run, scratches, taken
from torch import Tensor, nn

from overspill.capture.recording.recording import Recording
from overspill.costs.scratch import Scratch, Software, scratch_bytes


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


def backward(y: Tensor) -> None:
    """Without a loss, whose sum might take something itself."""
    y.backward(torch.empty_like(y))


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
            backward(table(torch.zeros(indices, dtype=torch.int64, device="cuda")))

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
        return taken(run(lambda: backward(nn.LayerNorm(width, **options).cuda()(cuda(rows, width, grad=True)))))

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


SUMS: list[tuple[tuple[int, ...], Any, list[int]]] = [
    ((4096, 768), [0], [4 * 768 * 64 * 128, 4 * 6]),  # the bias of a linear layer: 64 blocks a sum, 128 sums a block
    ((4096, 3072), [0], [4 * 3072 * 64 * 128, 4 * 24]),
    ((4096, 3072), [1], []),
    ((8, 512, 768), [0], []),
    ((1 << 20,), [0], [4 * 128, 4]),
    ((30000, 3), [0], []),
]
"""Shape, dimensions, and what PyTorch 2.11's own CUDA build asked for on 132 multiprocessors."""


@row(aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default)
@pytest.mark.parametrize(("shape", "dims", "expected"), SUMS)
def test_blocks_that_share_a_sum_have_what_each_has_added_up(
    shape: tuple[int, ...], dims: list[int], expected: list[int]
) -> None:
    """Reduce.cuh, `global_memory_size` and `semaphore_size`."""
    assert taken(run(lambda: cuda(*shape).sum(dims))) == expected
    assert taken(run(lambda: cuda(*shape).mean(dims))) == expected


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
