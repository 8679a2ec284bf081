"""A layout knows no unit: where all sizes are multiplied by a factor, so is every address, whichever solver made it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Trace
from overspill.placement.packing.registry import SOLVERS, solver_named

FACTORS = st.sampled_from([2, 3, 512, 1 << 20])


def scaled(trace: Trace, factor: int) -> Trace:
    """The same blocks, all bytes of which are multiplied by `factor`."""
    return Trace(tuple(times(block, factor) for block in trace.blocks))


def times(block: Block, factor: int) -> Block:
    pinned = None if block.pinned is None else block.pinned * factor
    return replace(block, nbytes=block.nbytes * factor, alignment=block.alignment * factor, pinned=pinned)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(SOLVERS) - {"mip"}))
@given(data=st.data(), factor=FACTORS)
@settings(max_examples=20, deadline=None)
def test_addresses_scale_with_the_sizes(name: str, data: st.DataObject, factor: int) -> None:
    solver = solver_named(name)
    trace = data.draw(traces(count=15, pins=solver.handles_pins))
    small, large = solver.solve(trace), solver.solve(scaled(trace, factor))
    assert small.layout is not None
    assert large.layout is not None
    assert large.layout.offsets == tuple(factor * offset for offset in small.layout.offsets)
    assert large.bound_bytes == factor * small.bound_bytes
