"""Op times: both sides of the roofline, and measurements in its place on the device that they were made on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.core import Device, Graph, LayerType, Op, Phase, Tensor, TensorKind
from overspill.costs import MeasuredTimes, op_seconds, signature

DEVICE = Device(
    name="toy",
    kind="cpu",
    memory_bytes=1 << 30,
    flops_per_second={"float32": 1000.0, "float16": 4000.0},
    memory_bytes_per_second=100.0,
    offload_bytes_per_second=1.0,
    prefetch_bytes_per_second=1.0,
    transfer_latency_seconds=0.0,
    op_overhead_seconds=0.5,
    full_duplex=True,
    context_bytes=0,
    efficiency={"conv": 0.5},
)


def seconds(
    flops: int,
    moved_bytes: int,
    *,
    dtype: str = "float32",
    layer: LayerType = LayerType.OTHER,
    measured: MeasuredTimes | None = None,
) -> float:
    graph = one_op(flops, moved_bytes, dtype=dtype, layer=layer)
    (found,) = op_seconds(graph, DEVICE, measured)
    return found


def one_op(flops: int, moved_bytes: int, *, dtype: str = "float32", layer: LayerType = LayerType.OTHER) -> Graph:
    tensor = Tensor(0, 40, TensorKind.ACTIVATION, "y", (2, 5), dtype)
    op = Op(0, "mm", "fc", layer, Phase.FORWARD, (), (0,), flops=flops, moved_bytes=moved_bytes)
    return Graph("one", (tensor,), (op,), (0,))


def test_an_op_of_many_flops_is_bound_by_compute() -> None:
    assert seconds(3000, 10) == pytest.approx(3.5)


def test_an_op_of_many_bytes_is_bound_by_memory() -> None:
    assert seconds(30, 400) == pytest.approx(4.5)


def test_an_op_that_does_nothing_costs_the_overhead() -> None:
    assert seconds(0, 0) == 0.5


def test_the_dtype_that_is_written_gives_the_rate() -> None:
    assert seconds(4000, 0, dtype="float16") == pytest.approx(1.5)


def test_a_dtype_without_a_rate_counts_as_float32() -> None:
    assert seconds(4000, 0, dtype="int64") == pytest.approx(4.5)


def test_an_op_that_writes_nothing_counts_as_float32() -> None:
    graph = one_op(1000, 0, dtype="float16")
    graph = replace(graph, ops=(replace(graph.ops[0], writes=()),), outputs=())
    assert op_seconds(graph, DEVICE) == pytest.approx((1.5,))


def test_a_layer_type_reaches_its_share_of_the_rate_and_not_of_the_bandwidth() -> None:
    assert seconds(1000, 0, layer=LayerType.CONV) == pytest.approx(2.5)
    assert seconds(0, 100, layer=LayerType.CONV) == pytest.approx(1.5)


def test_a_measured_time_replaces_the_roofline_on_the_same_device_only() -> None:
    key = signature(one_op(0, 0), one_op(0, 0).ops[0])
    assert seconds(3000, 10, measured=MeasuredTimes("toy", {key: 0.25})) == 0.25
    assert seconds(3000, 10, measured=MeasuredTimes("another", {key: 0.25})) == pytest.approx(3.5)


def test_a_measured_time_of_zero_counts() -> None:
    key = signature(one_op(0, 0), one_op(0, 0).ops[0])
    assert seconds(3000, 10, measured=MeasuredTimes("toy", {key: 0.0})) == 0.0


def test_an_op_that_was_not_measured_keeps_its_roofline() -> None:
    assert seconds(3000, 10, measured=MeasuredTimes("toy", {"something else": 0.25})) == pytest.approx(3.5)


def test_a_signature_tells_name_shapes_and_dtypes_apart_and_nothing_else() -> None:
    graph = one_op(1, 1)
    (op,) = graph.ops
    key = signature(graph, op)
    assert key == signature(one_op(9, 9, layer=LayerType.CONV), replace(op, layer="another", flops=9))
    assert key != signature(graph, replace(op, name="conv"))
    assert key != signature(one_op(1, 1, dtype="float16"), op)
    assert key != signature(replace(graph, tensors=(replace(graph.tensors[0], shape=(5, 2)),)), op)
    assert key != signature(graph, replace(op, reads=(0,)))


def test_measured_times_survive_being_saved() -> None:
    times = MeasuredTimes("toy", {"mm": 0.25})
    assert MeasuredTimes.from_json(times.to_json()) == times
