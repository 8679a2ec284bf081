"""Scratch of convolutions on GPUs with and without tensor cores for their dtype."""

import pytest

from overspill.costs import capability_of
from overspill.costs.scratch import Scratch, Software, scratch_bytes

# x, w, y, batch, channels in and out, groups, taps, stride, channels last, dimensions
SIZES = (32 * 64 * 56 * 56, 64 * 64 * 9, 32 * 64 * 56 * 56, 32, 64, 64, 1, 9, 1, 0, 2)


def test_capabilities_compare_as_numbers() -> None:
    assert capability_of("10.0") > capability_of("8.6") > capability_of("7.5")


@pytest.mark.parametrize(
    ("capability", "dtype", "copies"),
    [
        ("6.1", "float32", 0), ("7.0", "float32", 0), ("7.0", "float16", 2), ("8.0", "float32", 3),
        ("8.6", "float32", 2), ("9.0", "float32", 3), ("10.0", "float32", 2), ("12.0", "float32", 2),
    ],
)  # fmt: skip
def test_tensor_cores_read_copies_in_their_own_layout(capability: str, dtype: str, copies: int) -> None:
    item = {"float32": 4, "float16": 2}[dtype]
    tensors = [size * item for size in SIZES[:3]]
    found = scratch_bytes(Scratch("conv_forward", SIZES, dtype), capability, Software("2.13", "13.0", {}))
    assert found.central == sum(tensors[:copies])
    assert found.high == sum(tensors)
