"""The menus of a convolution: formulas by hand on one, and what holds for all."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core import Graph, LayerType, Op, Phase, Tensor, TensorKind
from overspill.costs import op_seconds, with_algorithms
from overspill.costs.convolution import IMPLICIT_SHARE, sizes_of
from overspill.devices import load_device

TITAN_X = load_device("titan-x")


def convolution(
    n: int, c: int, k: int, image: int, output: int, taps: int, groups: int = 1, *, transposed: bool = False
) -> Graph:
    """One convolution and its backward, which makes all three gradients."""
    x, w, y = (n, c, image, image), (k, c // groups, taps, taps), (n, k, output, output)
    if transposed:
        x, y = y, x
    shapes = {"x": x, "w": w, "b": (k,), "y": y, "dy": y, "dx": x, "dw": w, "db": (k,)}
    kinds = {"w": TensorKind.PARAMETER, "b": TensorKind.PARAMETER, "x": TensorKind.INPUT}
    tensors = []
    for name, shape in shapes.items():
        nbytes = 4
        for length in shape:
            nbytes *= length
        tensors.append(
            Tensor(len(tensors), nbytes, kinds.get(name, TensorKind.TEMPORARY), name, shape, "float32",
                   persistent=name in kinds)
        )  # fmt: skip
    flops = 2 * n * k * output**2 * (c // groups) * taps**2
    forward = Op(0, "convolution", "conv", LayerType.CONV, Phase.FORWARD, (0, 1, 2), (3,), flops=flops)
    loss = Op(1, "loss", "loss", LayerType.LOSS, Phase.BACKWARD, (3,), (4,))
    backward = Op(
        2, "convolution_backward", "conv", LayerType.CONV, Phase.BACKWARD, (0, 1, 4), (5, 6, 7), flops=2 * flops
    )
    return Graph("one convolution", tuple(tensors), (forward, loss, backward))


def menu_of(graph: Graph, op: int = 0, cudnn: int = 7) -> dict[str, int]:
    return {a.name: a.workspace_bytes for a in with_algorithms(graph, TITAN_X, cudnn=cudnn).ops[op].algorithms}


def test_the_workspaces_of_a_convolution_of_vgg_by_hand() -> None:
    graph = convolution(256, 128, 128, 112, 112, 3)
    tiles = 256 * 4 * 4  # 112 rows make 4 tiles of 30
    fft = 8 * 544 * (tiles * (128 + 128) + 128 * 128)
    assert menu_of(graph, cudnn=4) == {"fft-32": fft, "implicit-precomp-gemm": 4 * 128 * 9, "implicit-gemm": 0}


def test_small_maps_take_small_tiles_and_winograd_came_with_cudnn_5() -> None:
    graph = convolution(128, 512, 512, 14, 14, 3)
    assert next(iter(menu_of(graph, cudnn=4))) == "fft-16"
    assert menu_of(graph, cudnn=4)["fft-16"] == 8 * 144 * (128 * 1024 + 512 * 512)
    tiny = convolution(128, 512, 512, 6, 6, 3)
    assert "winograd" not in menu_of(tiny, cudnn=4)
    assert menu_of(tiny)["winograd"] == 4 * 16 * (128 * 9 * 1024 + 512 * 512)


@pytest.mark.parametrize(
    "graph",
    [
        convolution(8, 64, 128, 56, 56, 1),
        convolution(8, 64, 64, 56, 56, 3, groups=64),
        convolution(8, 64, 64, 56, 28, 3),
    ],
    ids=["1x1", "depthwise", "strided"],
)
def test_what_is_not_dense_with_stride_1_has_products_alone(graph: Graph) -> None:
    assert set(menu_of(graph)) <= {"gemm", "implicit-precomp-gemm", "implicit-gemm"}


def test_the_slowest_takes_the_assumed_share_longer_than_the_products_with_indices() -> None:
    made = with_algorithms(convolution(128, 64, 128, 56, 28, 3), TITAN_X).ops[0].algorithms
    assert [a.name for a in made] == ["implicit-precomp-gemm", "implicit-gemm"]
    assert made[1].slowdown == pytest.approx(1 / IMPLICIT_SHARE, rel=0.05)


def test_backward_reads_its_sizes_from_the_gradients_and_takes_twice_as_long() -> None:
    graph = with_algorithms(convolution(64, 128, 128, 56, 56, 3), TITAN_X)
    forward, _, backward = graph.ops
    assert [a.name for a in backward.algorithms] == [a.name for a in forward.algorithms]
    seconds = op_seconds(graph, TITAN_X)
    overhead = TITAN_X.op_overhead_seconds
    assert seconds[2] - overhead == pytest.approx(2 * (seconds[0] - overhead))


def test_a_convolution_with_a_choice_takes_what_its_fastest_does() -> None:
    plain = convolution(64, 128, 128, 56, 56, 3)
    chosen = with_algorithms(plain, TITAN_X)
    assert op_seconds(chosen, TITAN_X)[0] < op_seconds(plain, TITAN_X)[0]


def test_a_transposed_convolution_is_read_the_other_way_round() -> None:
    found = sizes_of(graph := convolution(4, 8, 16, 32, 16, 4, transposed=True), graph.ops[0])
    assert found is not None
    assert (found.c, found.k, found.image, found.output) == (8, 16, (32, 32), (16, 16))


def test_what_is_no_convolution_or_tells_no_sizes_is_left_alone() -> None:
    graph = convolution(4, 8, 16, 32, 32, 3)
    assert with_algorithms(graph, TITAN_X).ops[1] == graph.ops[1]
    odd = replace(graph, ops=(replace(graph.ops[0], flops=7), *graph.ops[1:]))
    assert with_algorithms(odd, TITAN_X).ops[0] == odd.ops[0]


sizes = st.builds(
    convolution,
    st.integers(1, 64),
    st.sampled_from([3, 16, 64]),
    st.sampled_from([8, 64]),
    image := st.shared(st.integers(2, 64), key="image"),
    image,
    st.sampled_from([1, 3, 5, 7]),
)


@given(sizes, st.sampled_from([4, 7]))
@settings(max_examples=100, deadline=None)
def test_every_menu_is_a_frontier_from_the_fastest_to_no_workspace(graph: Graph, cudnn: int) -> None:
    for op in with_algorithms(graph, TITAN_X, cudnn=cudnn).ops:
        if op.name == "loss":
            continue
        assert op.algorithms
        assert op.workspace_bytes == op.algorithms[0].workspace_bytes
        assert op.algorithms[0].slowdown == 1.0
        assert op.algorithms[-1].workspace_bytes == 0
        for faster, slower in pairwise(op.algorithms):
            assert faster.slowdown <= slower.slowdown
            assert faster.workspace_bytes > slower.workspace_bytes


@pytest.mark.parametrize(("image", "output", "taps", "stride"), [
    (224, 224, 3, 1), (224, 55, 11, 4), (224, 112, 7, 2), (35, 17, 3, 2), (149, 147, 3, 1), (56, 28, 1, 2), (7, 7, 3, 1),
    (27, 27, 5, 1), (7, 1, 7, 1),
])  # fmt: skip
def test_the_stride_follows_from_the_sizes(image: int, output: int, taps: int, stride: int) -> None:
    found = sizes_of(graph := convolution(2, 3, 8, image, output, taps), graph.ops[0])
    assert found is not None
    assert found.stride == stride
