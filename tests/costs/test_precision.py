"""float32 on tensor cores: as PyTorch is told, by whichever of its names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.costs.test_op_time import DEVICE, one_op

from overspill.core import LayerType
from overspill.costs import op_seconds

AMPERE = replace(DEVICE, kind="cuda", flops_per_second={"float32": 1000.0, "tfloat32": 8000.0}, efficiency={})
CONV, LINEAR = LayerType.CONV, LayerType.LINEAR


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """What torch is told by default, before and after."""
    yield
    torch.backends.cudnn.allow_tf32 = True
    torch.set_float32_matmul_precision("highest")


def seconds(layer: LayerType, device: object = AMPERE) -> float:
    (found,) = op_seconds(one_op(8000, 0, layer=layer), device)  # type: ignore[arg-type]
    return found - DEVICE.op_overhead_seconds


def test_by_default_convolutions_go_to_tensor_cores_and_matrix_products_do_not() -> None:
    assert seconds(CONV) == pytest.approx(1.0)
    assert seconds(LINEAR) == pytest.approx(8.0)


def test_convolutions_that_may_not_round_take_the_rate_of_float32() -> None:
    torch.backends.cudnn.allow_tf32 = False
    assert seconds(CONV) == pytest.approx(8.0)
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert seconds(CONV) == pytest.approx(1.0)


def test_matrix_products_that_may_round_take_the_rate_of_tensor_cores() -> None:
    torch.set_float32_matmul_precision("high")
    assert seconds(LINEAR) == pytest.approx(1.0)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert seconds(LINEAR) == pytest.approx(1.0)
    torch.backends.cuda.matmul.fp32_precision = "ieee"


def test_a_device_without_them_and_another_dtype_are_as_they_were() -> None:
    assert seconds(CONV, replace(AMPERE, flops_per_second={"float32": 1000.0})) == pytest.approx(8.0)
    half = replace(AMPERE, flops_per_second={"float32": 1000.0, "tfloat32": 8000.0, "float16": 2000.0})
    (found,) = op_seconds(one_op(8000, 0, dtype="float16", layer=CONV), half)
    assert found == pytest.approx(4.0 + DEVICE.op_overhead_seconds)
