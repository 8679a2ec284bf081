"""Which engines a convolution may have, and what workspace each takes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from overspill.costs.engines import ENGINES, Convolution, Shares, chances, kind_of, workspaces

# 3x3 of 64 channels on 56 x 56, 32 images
DENSE = Convolution(32 * 64 * 56 * 56, 64 * 64 * 9, 32 * 64 * 56 * 56, 32, 64, 64, 1, 9, 1, 0, 2)
FORWARD, DATA, WEIGHT = "conv_forward", "conv_backward_data", "conv_backward_weight"


@pytest.mark.parametrize(
    ("convolution", "family", "kind"),
    [
        (DENSE, FORWARD, "dense forward"),
        (DENSE, DATA, "dense data"),
        (replace(DENSE, kernel=1), WEIGHT, "pointwise weight"),
        (replace(DENSE, groups=4), FORWARD, "grouped forward"),
        (replace(DENSE, groups=64), FORWARD, None),
        (replace(DENSE, channels_last=1), FORWARD, None),
        (replace(DENSE, channels_in=3), FORWARD, None),
    ],
)
def test_a_kind_is_a_shape_and_a_pass(convolution: Convolution, family: str, kind: str | None) -> None:
    assert kind_of(family, convolution, "float32", "8.6") == kind
    assert kind_of(family, convolution, "float32", "7.5") is None  # no tensor cores for float32


def test_copies_are_of_what_an_engine_reads_and_writes() -> None:
    x, w, y = DENSE.x * 4, DENSE.w * 4, DENSE.y * 4
    assert workspaces(FORWARD, DENSE, 4, "8.6") == (0, x + w, x + w + y, 16 * 64 * 64 * 4)
    assert workspaces(DATA, DENSE, 4, "8.6")[1:3] == (y + w, x + w + y)
    assert workspaces(WEIGHT, DENSE, 4, "8.6")[1:3] == (x + y, x + w + y)
    assert workspaces(FORWARD, DENSE, 4, "8.0")[1] == x + w + y  # A100 has no kernels that write another layout
    assert workspaces(DATA, replace(DENSE, stride=2), 4, "8.6")[3] == 0


def test_chances_add_up_to_one_and_leave_out_what_a_pass_has_not() -> None:
    shares = Shares(forward=0.6, backward=0.8)
    for kind in ("dense forward", "grouped forward", "dense data", "pointwise data", "dense weight"):
        found = chances(kind, shares)
        assert len(found) == len(ENGINES)
        assert sum(found) == pytest.approx(1)
    assert chances("dense forward", shares)[3] == 0
    assert chances("pointwise weight", shares) == pytest.approx((0.8, 0, 0.2, 0))
