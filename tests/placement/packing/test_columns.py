"""Blocks as columns mean what the trace means, and their checker says what the trace's says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.placement.packing.random_traces import traces

from overspill.core import Block, Layout, Trace
from overspill.core.errors import InvalidLayoutError, RequestError
from overspill.placement.packing.columns import Columns
from overspill.placement.packing.solvers.greedy import Greedy
from overspill.placement.packing.verdict import space_peaks


def says(layout: Layout, trace: Trace) -> tuple[bool, bool]:
    """Whether the two checkers take the layout."""
    answers = []
    for check in (
        lambda: layout.validate(trace),
        lambda: Columns.of(trace).validate(
            np.array(layout.offsets, dtype=np.int64), layout.peak_bytes, layout.lower_bound_bytes
        ),
    ):
        try:
            check()
            answers.append(True)
        except InvalidLayoutError:
            answers.append(False)
    return answers[0], answers[1]


@settings(max_examples=150, deadline=None)
@given(trace=traces(count=8), data=st.data())
def test_both_checkers_agree_on_layouts_that_are_right_or_nearly(trace: Trace, data: st.DataObject) -> None:
    right = Greedy().solve(trace).layout
    assert right is not None
    assert says(right, trace) == (True, True)
    offsets = list(right.offsets)
    if offsets:
        at = data.draw(st.integers(0, len(offsets) - 1))
        offsets[at] = max(0, offsets[at] + data.draw(st.integers(-6, 6)))
    peak = sum(space_peaks(trace, offsets).values()) + data.draw(st.sampled_from([0, 0, 0, 1]))
    bound = right.lower_bound_bytes - data.draw(st.sampled_from([0, 0, 0, 1]))
    nearly = Layout("", tuple(offsets), peak, bound)
    one, other = says(nearly, trace)
    assert one == other


@settings(max_examples=60, deadline=None)
@given(trace=traces(count=8))
def test_a_trace_comes_back(trace: Trace) -> None:
    again = Columns.of(trace).trace([block.name for block in trace.blocks])
    assert [(b.pieces, b.nbytes, b.alignment, b.pinned, b.space) for b in again.blocks] == [
        (b.pieces, b.nbytes, b.alignment, b.pinned, b.space) for b in trace.blocks
    ]


@pytest.mark.parametrize(
    ("block", "said"),
    [
        (Block(0, 0, 1, -1), "negative"),
        (Block(0, 3, 1, 1), "lives in"),
        (Block(0, 0, 9, 1, gaps=((4, 3),)), "lives in"),
        (Block(0, 0, 9, 1, gaps=((4, 6), (5, 7))), "lives in"),
        (Block(0, 0, 1, 1, alignment=0), "aligned to 0"),
        (Block(0, 0, 1, 1, alignment=4, pinned=6), "at address 6"),
        (Block(0, 0, 1, 1, pinned=-6), "at address -6"),
    ],
)
def test_a_block_that_cannot_be_placed_is_refused(block: Block, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        Columns.of(Trace((Block(7, 0, 4, 4, gaps=((1, 2),)), block))).refuse_flaws()
