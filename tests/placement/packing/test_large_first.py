"""Large blocks first: valid layouts, with the small blocks in what the large ones leave."""

import time

import numpy as np
from hypothesis import given, settings
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Layout, Trace
from overspill.placement.packing.problem import Problem
from overspill.placement.packing.solvers.large_first import layouts, tight
from overspill.placement.packing.solvers.portfolio import Portfolio

UNIT = 10_000


def chosen(problem: Problem) -> list[np.ndarray]:
    return list(layouts(problem, lambda large: tight(large, time.perf_counter() + 1000, 0)))


def mixed(rows: list[tuple[int, int, int]]) -> Trace:
    """Blocks of (start, end, bytes)."""
    return Trace(tuple(Block(i, *row) for i, row in enumerate(rows)))


@settings(max_examples=20, deadline=None)
@given(trace=traces(count=16, gaps=False, pins=False))
def test_every_layout_is_valid(trace: Trace) -> None:
    blocks = tuple(Block(b.id, b.start, b.end, b.nbytes * (UNIT if b.id % 2 else 1)) for b in trace.blocks)
    scaled = Trace(blocks)
    problem = Problem.of(scaled)
    for found in chosen(problem):
        offsets = [0] * len(blocks)
        for position, offset in zip(problem.index.tolist(), found.tolist(), strict=True):
            offsets[position] = offset
        Layout("", tuple(offsets), problem.peak_bytes(found), scaled.lower_bound_bytes).validate(scaled)


def test_large_blocks_lie_within_their_bound_and_small_ones_above() -> None:
    trace = mixed([(0, 9, 7), (0, 4, UNIT), (3, 9, UNIT), (1, 4, 1), (3, 6, 1)])
    problem = Problem.of(trace)
    for offsets in chosen(problem):
        assert offsets[0] == 0
        assert problem.peak_bytes(offsets) == trace.lower_bound_bytes
        assert sorted(offsets[1:3]) == [7, 7 + UNIT]


def test_there_is_nothing_to_do_without_small_blocks_or_with_pins_gaps_and_several_alignments() -> None:
    large, small = Block(0, 0, 2, UNIT), Block(1, 1, 3, 1)
    for other in (
        Block(1, 1, 3, UNIT),
        Block(1, 1, 3, 1, alignment=2),
        Block(1, 1, 3, 1, pinned=0),
        Block(1, 0, 3, 1, gaps=((1, 2),)),
    ):
        assert not chosen(Problem.of(Trace((large, other))))
    assert chosen(Problem.of(Trace((large, small, Block(2, 0, 1, UNIT)))))


def test_small_blocks_between_large_ones_cost_the_portfolio_nothing() -> None:
    random = np.random.default_rng(0)
    rows = []
    for start in random.integers(40, size=150).tolist():
        rows.append((start, start + int(random.integers(1, 12)), UNIT << int(random.integers(4))))
        rows.append((start, start + int(random.integers(1, 12)), int(random.integers(1, 4))))
    trace = mixed(rows)
    with_large, without = (Portfolio(exact_blocks=k, restarts=0).solve(trace).layout for k in (500, 0))
    assert with_large is not None
    assert without is not None
    assert with_large.peak_bytes <= without.peak_bytes
