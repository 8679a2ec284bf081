"""Boxes: what comes out of them is valid, and a rectangle that was cut is put together again."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from tests.placement.packing.random_traces import traces
from tests.placement.packing.small_problems import tiling

from overspill.core import Layout, Trace
from overspill.placement.packing._packing import merges
from overspill.placement.packing.base import Limits
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.boxes import boxed_layouts
from overspill.placement.packing.solvers.portfolio import Portfolio


@settings(max_examples=60, deadline=None)
@given(trace=traces(count=16, gaps=False, pins=False))
def test_every_layout_is_valid(trace: Trace) -> None:
    problem = Problem.of(trace)
    for found in boxed_layouts(problem):
        offsets = [0] * len(trace.blocks)
        for position, offset in zip(problem.index.tolist(), found.tolist(), strict=True):
            offsets[position] = offset
        Layout("", tuple(offsets), problem.peak_bytes(found), trace.lower_bound_bytes).validate(trace)


def test_blocks_that_fill_a_rectangle_become_one_box() -> None:
    below, left, right = (0, 6, 4), (0, 2, 3), (2, 6, 3)
    start, end, nbytes = np.array([below, left, right], dtype=np.int64).T.copy()
    flat, waste = merges(start, end, nbytes, 0.0, 0)
    made = flat.reshape(-1, 6).tolist()
    assert waste == [0.0, 0.0]
    assert sorted(made[0][:2]) == [1, 2]
    assert made[0][2:] == [0, 6, 3, 0]
    assert made[1][2:5] == [0, 6, 7]
    assert not merges(start, end, nbytes + np.array([0, 1, 0]), 0.0, 0)[1]  # one that does not fit is left alone


def test_blocks_that_all_want_the_same_partner_take_no_long_time() -> None:
    start = np.zeros(3000, dtype=np.int64)
    _, waste = merges(start, start + 1, np.full(3000, 7), 0.01, 0)
    assert waste == [0.0] * len(waste)
    assert len(waste) > 1000


@pytest.mark.long
@pytest.mark.parametrize("blocks", [500, 3000])
def test_a_square_that_was_cut_is_put_together_again(blocks: int) -> None:
    trace = tiling(blocks, random.Random(blocks), 1 << 24)  # hardly two lengths are equal by chance
    assert Portfolio().solve(trace, Limits(time_limit_seconds=10)).optimal
