"""The backjumping search finds layouts within a capacity, ever smaller ones, and does the same in C++ and in Python."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Layout, Trace
from overspill.placement.packing import native
from overspill.placement.packing.problem import Integers, Problem
from overspill.placement.packing.solvers import backjump
from overspill.placement.packing.solvers.backjump import shrinking
from overspill.placement.packing.solvers.backjump_twin import TwinBackjumpSearch
from overspill.placement.packing.solvers.exact_model import ExactModel
from overspill.placement.packing.solvers.portfolio import Portfolio

PATIENT = 1000.0
plain_traces = traces(count=20, gaps=False, pins=False, alignments=(1,))


def searches(problem: Problem) -> list[backjump.Search]:
    model = ExactModel.of(problem)
    columns = (model.sections, model.pieces.start, model.pieces.end, model.size, model.below)
    return [TwinBackjumpSearch(*columns), *([native.backjump_search(*columns)] if native.AVAILABLE else [])]


def check(trace: Trace, problem: Problem, offsets: Integers) -> None:
    layout = [0] * len(trace.blocks)
    for position, offset in zip(problem.index.tolist(), offsets.tolist(), strict=True):
        layout[position] = offset
    Layout("", tuple(layout), problem.peak_bytes(offsets), trace.lower_bound_bytes).validate(trace)


@pytest.mark.skipif(not native.AVAILABLE, reason="the native modules are not built")
@settings(max_examples=100, deadline=None)
@given(trace=plain_traces, spare=st.integers(-1, 4), seed=st.integers(0, 3), patience=st.integers(1, 100))
def test_the_twins_agree(trace: Trace, spare: int, seed: int, patience: int) -> None:
    problem = Problem.of(trace)
    unit = ExactModel.of(problem).unit
    rank = np.random.default_rng(seed).permutation(len(problem))
    capacity = problem.lower_bound_bytes // unit + spare
    python, compiled = (s.attempt(capacity, rank, patience, PATIENT) for s in searches(problem))
    for found, nodes, offsets, blames in (python, compiled):
        assert (found, nodes, blames) == (python[0], python[1], python[3])
        assert not found or offsets == python[2]


@settings(max_examples=60, deadline=None)
@given(trace=plain_traces, spare=st.integers(0, 4))
def test_what_is_found_is_valid_and_within_the_capacity(trace: Trace, spare: int) -> None:
    problem = Problem.of(trace)
    unit, capacity = ExactModel.of(problem).unit, problem.lower_bound_bytes + spare
    for search in searches(problem):
        found, _, offsets, _ = search.attempt(capacity // unit, np.arange(len(problem)), 1000, PATIENT)
        if found:
            check(trace, problem, np.array(offsets, dtype=np.int64) * unit)
            assert problem.peak_bytes(np.array(offsets, dtype=np.int64) * unit) <= capacity


def test_a_section_that_is_too_full_is_a_dead_end_from_the_start() -> None:
    problem = Problem.of(Trace((Block(0, 0, 2, 3), Block(1, 1, 3, 5))))
    for search in searches(problem):
        found, nodes, _, blames = search.attempt(7, np.arange(2), 1000, PATIENT)
        assert not found
        assert nodes <= 4
        assert sum(blames) > 0


@settings(max_examples=25, deadline=None)
@given(trace=plain_traces, seed=st.integers(0, 3))
def test_peaks_shrink_to_the_target_in_both_twins(trace: Trace, seed: int) -> None:
    problem = Problem.of(trace)
    target, peak = problem.lower_bound_bytes, 2 * problem.lower_bound_bytes
    deadline = time.perf_counter() + PATIENT
    found: list[list[list[int]]] = []
    for compiled in (False, native.AVAILABLE):
        layouts = list(shrinking(problem, target, peak, deadline, seed=seed, attempts=12, native=compiled))
        for offsets in layouts:
            check(trace, problem, offsets)
        peaks = [problem.peak_bytes(offsets) for offsets in layouts]
        assert all(new < max(old, target + 1) for old, new in pairwise([peak, *peaks]))
        found.append([offsets.tolist() for offsets in layouts])
    assert found[0] == found[1]


@pytest.mark.skipif(not native.AVAILABLE, reason="the search takes long in Python")
def test_a_full_queue_is_packed_lower_than_by_the_heuristics() -> None:
    draw = random.Random(0)
    live: list[tuple[int, int]] = []
    blocks: list[Block] = []
    for time_step in range(216):
        nbytes = draw.choice([4, 6, 8, 12, 16, 24, 32, 48])
        while sum(size for _, size in live) + nbytes > 400:
            start, size = live.pop(0 if draw.random() < 0.7 else draw.randrange(len(live)))
            blocks.append(Block(len(blocks), start, time_step, size))
        live.append((time_step, nbytes))
    trace = Trace((*blocks, *(Block(len(blocks) + i, row[0], 216, row[1]) for i, row in enumerate(live))))
    problem = Problem.of(trace)
    rough = Portfolio(exact_blocks=0).solve(trace).layout
    assert rough is not None
    found = list(shrinking(problem, problem.lower_bound_bytes, rough.peak_bytes, time.perf_counter() + PATIENT))
    check(trace, problem, found[-1])
    assert problem.peak_bytes(found[-1]) < rough.peak_bytes
