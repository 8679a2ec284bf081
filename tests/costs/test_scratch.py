"""Scratch of convolutions on GPUs with and without tensor cores for their dtype."""

import pytest

from overspill.costs import capability_of
from overspill.costs.scratch import Scratch, Software, room_bytes, scratch_bytes

# x, w, y, batch, channels in and out, groups, taps, stride, channels last, dimensions
SIZES = (32 * 64 * 56 * 56, 64 * 64 * 9, 32 * 64 * 56 * 56, 32, 64, 64, 1, 9, 1, 0, 2)


def test_capabilities_compare_as_numbers() -> None:
    assert capability_of("10.0") > capability_of("8.6") > capability_of("7.5")


@pytest.mark.parametrize(
    ("capability", "dtype", "copied"),
    [
        ("6.1", "float32", False), ("7.0", "float32", False), ("7.0", "float16", True), ("8.0", "float32", True),
        ("8.6", "float32", True), ("9.0", "float32", True), ("10.0", "float32", True), ("12.0", "float32", True),
    ],
)  # fmt: skip
def test_a_convolution_takes_nothing_or_up_to_copies_where_there_are_tensor_cores(
    capability: str, dtype: str, copied: bool
) -> None:
    item = {"float32": 4, "float16": 2}[dtype]
    found = scratch_bytes(Scratch("conv_forward", SIZES, dtype), capability, Software("2.13", "13.0", {}))
    most = copied * item * sum(SIZES[:3])
    assert (found.low, found.central, found.high) == (0, most if capability == "9.0" else 0, most)


@pytest.mark.parametrize(
    ("family", "channels", "side", "kernel", "stride", "measured_mib"),
    [
        ("conv_forward", (64, 64), 56, 3, 1, 98.14), ("conv_forward", (64, 256), 56, 1, 1, 0.0),
        ("conv_backward_weight", (64, 64), 56, 3, 1, 100.1), ("conv_backward_weight", (256, 1024), 14, 1, 1, 64.0),
        ("conv_backward_weight", (128, 512), 28, 1, 1, 16.0), ("conv_backward_weight", (512, 1024), 28, 1, 2, 156.0),
    ],
)  # fmt: skip
def test_hopper_takes_the_workspaces_that_were_measured_on_one(
    family: str, channels: tuple[int, int], side: int, kernel: int, stride: int, measured_mib: float
) -> None:
    """ResNet-50, 64 images, on an H100: torch 2.11, cuDNN 9.19 (docs/gpu.md)."""
    into, out = channels
    x, w, y = 64 * into * side**2, into * out * kernel**2, 64 * out * (side // stride) ** 2
    sizes = (x, w, y, 64, into, out, 1, kernel**2, stride, 0, 2)
    found = scratch_bytes(Scratch(family, sizes, "float32"), "9.0", Software("2.11", "13.0", {}))
    assert found.central / 2**20 == pytest.approx(measured_mib, rel=0.01)


def test_a_small_gpu_shares_a_sum_among_fewer_blocks() -> None:
    """Reduce.cuh by hand: 88200 rows of 384 floats, 32 threads of 4 columns across, 4 down: 5513 values a thread of 16 rows."""
    a_block, threads, grid, a_thread = 4 * 384 * 128, 128, 3, 22050
    software = Software("2.6", "12.4", {})

    def taken(capability: str, multiprocessors: int, family: str = "sum_parts", values: int = a_thread) -> int:
        scratch = Scratch(family, (a_block, threads, grid, values), "")
        return scratch_bytes(scratch, capability, software, multiprocessors).central

    assert taken("9.0", 132) == a_block * (132 * 16 // 3)  # 2048 threads a multiprocessor are 16 blocks
    assert taken("8.6", 28) == a_block * (28 * 12 // 3)
    assert taken("7.5", 40) == a_block * -(-40 * 8 // 3)
    assert taken("8.6", 28, values=320) == a_block * 20  # not fewer than 16 values a thread
    assert taken("8.6", 28, "sum_counts") == 4 * grid
    assert taken("8.6", 0) == 0  # as many sums as the GPU has room for: none is shared


def test_a_plan_leaves_room_for_the_copies_that_a_faster_engine_reads() -> None:
    software, (x, w, _, *_rest) = Software("2.13", "13.0", {}), SIZES
    assert room_bytes(Scratch("conv_forward", SIZES, "float32"), "8.6", software) == 4 * (x + w)
    assert room_bytes(Scratch("conv_backward_data", SIZES, "float32"), "8.6", software) == 16 * 64 * 64 * 4
    assert room_bytes(Scratch("conv_backward_weight", SIZES, "float32"), "8.6", software) == 0
    assert room_bytes(Scratch("conv_forward", SIZES, "float32"), "6.1", software) == 0
    assert room_bytes(Scratch("bytes", (8,), ""), "6.1", software) == 8
