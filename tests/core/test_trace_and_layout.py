"""The Trace's lower bound and the Layout's validator, against naive counts that share no code with them."""

from itertools import accumulate, combinations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from overspill.core import Block, Layout, Trace
from overspill.core.errors import InvalidLayoutError


@st.composite
def traces(draw: st.DrawFn, *, least: int = 0) -> Trace:
    """Up to eight blocks at small positions; `least` is the smallest size and lifetime."""
    count = draw(st.integers(0, 8))
    starts = draw(st.lists(st.integers(0, 12), min_size=count, max_size=count))
    lives = draw(st.lists(st.integers(least, 6), min_size=count, max_size=count))
    sizes = draw(st.lists(st.integers(least, 50), min_size=count, max_size=count))
    parts = zip(starts, lives, sizes, strict=True)
    return Trace(tuple(Block(i, start, start + life, size) for i, (start, life, size) in enumerate(parts)))


def live_bytes_at(trace: Trace, position: int) -> int:
    return sum(block.nbytes for block in trace.blocks if block.start <= position < block.end)


def overlapping(trace: Trace, offsets: list[int]) -> bool:
    """Whether two live blocks share a byte, pair by pair and byte by byte."""
    cells = [
        {(position, offset + byte) for position in range(block.start, block.end) for byte in range(block.nbytes)}
        for block, offset in zip(trace.blocks, offsets, strict=True)
    ]
    return any(left & right for left, right in combinations(cells, 2))


def peak(trace: Trace, offsets: list[int]) -> int:
    """The highest end of a block that is live at some time."""
    return max(
        (o + b.nbytes for b, o in zip(trace.blocks, offsets, strict=True) if b.nbytes and b.start < b.end), default=0
    )


PAIR = Trace((Block(0, 0, 2, 10), Block(1, 1, 3, 20)))  # both live in [1, 2)
CHAIN = Trace((Block(0, 0, 2, 10), Block(1, 2, 3, 20)))  # one ends where the other starts


@given(traces())
def test_the_lower_bound_is_the_most_live_bytes_at_any_position(trace: Trace) -> None:
    assert trace.lower_bound_bytes == max(live_bytes_at(trace, position) for position in range(20))


@given(traces(), st.integers(1, 1000))
def test_scaling_all_sizes_scales_the_lower_bound(trace: Trace, factor: int) -> None:
    scaled = Trace(tuple(Block(b.id, b.start, b.end, b.nbytes * factor) for b in trace.blocks))
    assert scaled.lower_bound_bytes == factor * trace.lower_bound_bytes


@given(traces(), st.integers(1, 1000))
def test_dilating_time_keeps_the_lower_bound(trace: Trace, factor: int) -> None:
    slow = Trace(tuple(Block(b.id, b.start * factor, b.end * factor, b.nbytes) for b in trace.blocks))
    assert slow.lower_bound_bytes == trace.lower_bound_bytes


def test_an_empty_trace_needs_nothing() -> None:
    assert Trace(()).lower_bound_bytes == 0
    assert Trace(()).events == ()


def test_frees_come_before_allocations_at_one_position() -> None:
    assert CHAIN.events == ((0, 10), (2, -10), (2, 20), (3, -20))
    assert CHAIN.lower_bound_bytes == 20


@given(traces())
def test_a_layout_that_shares_no_byte_is_accepted(trace: Trace) -> None:
    ends = list(accumulate((block.nbytes for block in trace.blocks), initial=0))
    Layout("stacked", tuple(ends[:-1]), peak(trace, ends[:-1]), trace.lower_bound_bytes).validate(trace)


@given(traces(least=1), st.data())
def test_a_layout_is_refused_exactly_when_two_live_blocks_share_a_byte(trace: Trace, data: st.DataObject) -> None:
    count = len(trace.blocks)
    offsets = data.draw(st.lists(st.integers(0, 80), min_size=count, max_size=count))
    layout = Layout("random", tuple(offsets), peak(trace, offsets), trace.lower_bound_bytes)
    if overlapping(trace, offsets):
        with pytest.raises(InvalidLayoutError, match="overlap"):
            layout.validate(trace)
    else:
        layout.validate(trace)


def test_blocks_that_follow_one_another_may_share_their_bytes() -> None:
    Layout("reuse", (0, 0), 20, 20).validate(CHAIN)


def test_an_overlap_is_reported_with_both_blocks() -> None:
    with pytest.raises(InvalidLayoutError, match=r"blocks 0 \[0, 10\) and 1 \[9, 29\) overlap"):
        Layout("bad", (0, 9), 29, 30).validate(PAIR)


def test_a_peak_below_what_the_blocks_reach_is_refused() -> None:
    with pytest.raises(InvalidLayoutError, match="peak of 29"):
        Layout("bad", (0, 10), 29, 30).validate(PAIR)


@pytest.mark.parametrize("bound", [0, 29, 31])
def test_a_lower_bound_that_is_not_the_traces_is_refused(bound: int) -> None:
    with pytest.raises(InvalidLayoutError, match="lower bound"):
        Layout("bad", (0, 10), 30, bound).validate(PAIR)


@pytest.mark.parametrize("offsets", [(), (0,), (0, 10, 30)])
def test_an_offset_too_many_or_too_few_is_refused(offsets: tuple[int, ...]) -> None:
    with pytest.raises(InvalidLayoutError, match="for 2 blocks"):
        Layout("bad", offsets, 100, 30).validate(PAIR)


def test_an_address_below_zero_is_refused() -> None:
    with pytest.raises(InvalidLayoutError):
        Layout("bad", (-10, 0), 20, 30).validate(PAIR)


@given(traces(least=1))
def test_fragmentation_is_the_share_above_the_lower_bound(trace: Trace) -> None:
    assume(trace.blocks)
    bound = trace.lower_bound_bytes
    assert Layout("tight", (), bound, bound).fragmentation == 0.0
    assert Layout("loose", (), 2 * bound, bound).fragmentation == 0.5


def test_an_empty_layout_is_valid_and_not_fragmented() -> None:
    empty = Layout("none", (), 0, 0)
    empty.validate(Trace(()))
    assert empty.fragmentation == 0.0
