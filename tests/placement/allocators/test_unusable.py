"""Unusable free space, U_f of Dymem's eq. 1, and how far segments are used, over a replay (HPDC'20, §3.3.1 and §5.4)."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overspill.core.errors import OutOfMemoryError, RequestError
from overspill.placement import ALLOCATE, FREE, Events, allocator_named, replay
from overspill_papers.placement import CnmemConfig

MIB = 1 << 20
Case = Callable[[str, int], tuple[Events, Any, int | None]]


def equation_1(free: list[int], j: int) -> float:
    """U_f(j) of free blocks of 2^i bytes, term by term."""
    total = sum(free)
    k = [free.count(1 << i) for i in range(64)]
    return (total - sum((1 << i) * k[i] for i in range(j, 64))) / total if total else 0.0


def freed(sizes: list[int]) -> Events:
    """Blocks of these sizes with one live byte or so between them, all freed."""
    rows = []
    for i, nbytes in enumerate(sizes):
        rows += [(ALLOCATE, 2 * i, nbytes, 0), (ALLOCATE, 2 * i + 1, 1, 0)]
    return Events.from_rows(rows + [(FREE, 2 * i, 0, 0) for i in range(len(sizes))])


@settings(deadline=None, max_examples=50)
@given(exponents=st.lists(st.integers(9, 24), min_size=1, max_size=8), j=st.integers(0, 26))
def test_it_is_equation_1_where_sizes_are_powers_of_two(exponents: list[int], j: int) -> None:
    sizes = [1 << i for i in exponents]
    pool = CnmemConfig(pool_bytes=sum(sizes) + 512 * len(sizes), grows=False)  # nothing is left at its end
    done = replay(freed(sizes), "cnmem", config=pool, request_bytes=1 << j)
    assert done.unusable[-1] == equation_1(sizes, j)


def test_figure_7_the_request_of_400_finds_500_that_it_cannot_use() -> None:
    rows = [(ALLOCATE, i, n * MIB, 0) for i, n in enumerate((200, 100, 300))] + [(FREE, 0, 0, 0), (FREE, 2, 0, 0)]
    events, pool = Events.from_rows(rows), CnmemConfig(pool_bytes=600 * MIB, grows=False)
    for request, expected in ((100, [0, 0, 0, 0, 0]), (250, [0, 0, 0, 1, 0.4]), (400, [0, 1, 0, 1, 1])):
        done = replay(events, "cnmem", config=pool, request_bytes=request * MIB)
        assert done.unusable.tolist() == expected


def test_chunks_leave_no_free_space_unusable_but_for_what_is_too_little() -> None:
    rows = [(ALLOCATE, i, 2 * MIB, 0) for i in range(6)] + [(FREE, i, 0, 0) for i in (0, 2, 4)]
    done = replay(Events.from_rows(rows), "chunked", request_bytes=6 * MIB)
    assert done.unusable.tolist() == [0] * 6 + [1, 1, 0]


@pytest.mark.parametrize("seed", range(6))
def test_the_curves_are_what_the_segments_say(name: str, seed: int, random_case: Case) -> None:
    events, config, capacity = random_case(name, seed)
    allocator = allocator_named(name, config, capacity_bytes=capacity)
    done = replay(events, name, capacity_bytes=capacity, config=config, request_bytes=MIB)
    assert done.usable is not None
    assert done.spread is not None
    assert done.reserved is not None
    assert len(done.usable) == len(done.spread) == len(done.reserved)
    assert np.all((done.unusable >= 0) & (done.unusable <= 1))
    assert np.all(done.spread <= done.reserved)
    live: dict[int, int] = {}
    for action, block, nbytes, stream, mobility in zip(
        *(column.tolist() for column in (events.action, events.block, events.nbytes, events.stream, events.mobility)),
        strict=True,
    ):
        if action == FREE and block in live:
            allocator.free(live.pop(block))
        elif action != FREE:
            try:
                live[block] = allocator.allocate(nbytes, stream, mobility)
            except OutOfMemoryError:
                continue
        free = [b.nbytes for s in allocator.segments() for b in s.blocks if b.state == "free"]
        if name != "chunked":
            assert allocator.usable_bytes(MIB) == sum(n for n in free if n >= MIB)
        if name != "gtbm":
            assert allocator.spread_bytes == sum(_used(segment.blocks) for segment in allocator.segments())


def _used(blocks: Any) -> int:
    last = max((i for i, block in enumerate(blocks) if block.state == "live"), default=-1)
    return sum(block.nbytes for block in blocks[: last + 1] if block.state != "unmapped")


def test_without_a_request_nothing_is_said() -> None:
    with pytest.raises(RequestError, match="replay with request_bytes"):
        _ = replay(Events.from_rows([]), curves=True).unusable
