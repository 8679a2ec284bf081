"""Draws of engines: the same every time, for all batch sizes; and the interval that comes of them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn

from overspill.costs import Interval
from overspill.costs.engines import Shares
from overspill.estimation import Estimate
from overspill.estimation.api import estimate
from overspill.estimation.engine_samples import COUNT, EngineSamples, interval

OFTEN = Shares(forward=0.5, backward=0.5)
NOTHING = Interval(0, 0, 0)


def made(batch: int) -> Estimate:
    def build() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 8, 3, groups=2))

    return estimate(
        build, torch.empty(batch, 8, 32, 32), lambda model, x: model(x).mean(), "sgd", device="rtx3060", batch=batch
    )


@pytest.fixture(scope="module")
def four() -> Estimate:
    return made(4)


def sizes(job: Estimate, shares: Shares) -> np.ndarray:
    return np.array([demand.nbytes for demand in job.draws.demands(shares)])


def test_draws_differ_in_scratch_of_convolutions_alone(four: Estimate) -> None:
    found = sizes(four, OFTEN)
    assert len(found) == COUNT
    assert len(np.unique(found, axis=0)) > COUNT // 2
    changed = np.flatnonzero((found != four.demand.nbytes).any(axis=0))
    assert all(four.recording.allocations[place].scratch.family.startswith("conv_") for place in changed)
    likeliest = found == four.demand.nbytes  # with even shares, about half of what can be drawn
    assert 0.3 < likeliest[:, changed].mean() < 0.7


def test_draws_are_the_same_again_and_at_another_batch_size(four: Estimate) -> None:
    again = sizes(four, OFTEN)
    assert np.array_equal(again, sizes(four, OFTEN))
    assert np.array_equal(again > four.demand.nbytes, sizes(made(6), OFTEN) > made(6).demand.nbytes)


def test_all_iterations_take_the_same_engines(four: Estimate) -> None:
    by_scratch: dict[object, set[int]] = {}
    for place, size in enumerate(next(itertools.islice(four.draws.demands(OFTEN), 3, None)).nbytes.tolist()):
        scratch = four.recording.allocations[place].scratch
        if scratch is not None and scratch.family.startswith("conv_"):
            by_scratch.setdefault(scratch, set()).add(size)
    assert by_scratch
    assert all(len(found) == 1 for found in by_scratch.values())


def test_a_gpu_without_tensor_cores_has_nothing_to_draw(four: Estimate) -> None:
    older = four.on("p40")
    assert not list(older.draws.demands(OFTEN))
    assert older.total.low < older.total.central < older.total.high


def test_where_all_engines_work_in_place_every_draw_is_the_likeliest(four: Estimate) -> None:
    draws = EngineSamples(four.recording, four.device, four.demand)
    found = np.array([demand.nbytes for demand in draws.demands(Shares(forward=1.0, backward=1.0))])
    assert (found == four.demand.nbytes).all()


def test_an_interval_leaves_a_twentieth_of_the_draws_at_each_end() -> None:
    drawn = list(range(0, 1000, 10))
    found = interval(500, drawn, NOTHING, 0.0)
    inside = [found.low <= peak <= found.high for peak in drawn]
    assert (inside.index(True), inside[::-1].index(True)) == (5, 5)
    assert found.central == 500


def test_distances_of_an_interval_are_added_as_independent_ones_are() -> None:
    assert interval(1000, [], Interval(70, 100, 140), 0.0) == Interval(1070, 1100, 1140)
    assert interval(900, [], Interval(70, 100, 140), 0.04) == Interval(950, 1000, 1056)  # 30 and 40, 40 and 40
    assert interval(10, [], Interval(0, 0, 50), 2.0).low == 0
