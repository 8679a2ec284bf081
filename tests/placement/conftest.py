"""Every allocator, and random events to try them with."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from overspill.core import Mobility
from overspill.placement import ALLOCATORS, CachingConfig, Events, allocator_named
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.chunked import ChunkedConfig
from overspill.placement.allocators.planned import PlannedConfig
from overspill.placement.allocators.two_ended import TwoEndedConfig
from overspill_papers.placement import BestFitConfig, BfcConfig, BuddyConfig, ChainerConfig, CnmemConfig, MxnetConfig

MIB = 1 << 20


@pytest.fixture(params=ALLOCATORS)
def name(request: pytest.FixtureRequest) -> str:
    """The name of an allocator."""
    return request.param


@pytest.fixture
def make(name: str) -> Callable[..., Allocator]:
    """`make(config, capacity_bytes=…)` gives the allocator that the test is about."""

    def build(config: Any = None, capacity_bytes: int | None = None) -> Allocator:
        return allocator_named(name, config, capacity_bytes=capacity_bytes)

    return build


def _caching(r: random.Random) -> CachingConfig:
    chosen: dict[str, Any] = {}
    if r.random() < 0.4:
        chosen["expandable_segments"] = True
    if r.random() < 0.4:
        chosen["max_split_bytes"] = r.choice([20, 24, 40]) * MIB
    if r.random() < 0.3:
        chosen["max_non_split_rounding_bytes"] = r.choice([20, 24, 40]) * MIB
    if r.random() < 0.3:
        chosen["roundup_power2_divisions"] = tuple(r.choice([0, 1, 2, 4, 8]) for _ in range(16))
    if r.random() < 0.5:
        chosen["per_process_memory_fraction"] = r.choice([0.5, 0.7, 0.99])
        chosen["garbage_collection_threshold"] = r.choice([0.0, 0.2, 0.5, 0.8])
    if r.random() < 0.3:
        chosen["tie_break"] = r.choice(["oldest", "falling"])
    if r.random() < 0.2:
        chosen["large_segment_bytes"] = r.choice([12, 16, 20]) * MIB
    return CachingConfig(**chosen)


def _mxnet(r: random.Random) -> MxnetConfig:
    return MxnetConfig(
        pool_type=r.choice(["naive", "round"]),
        reserve_percent=r.choice([0, 5, 30]),
        linear_cutoff=r.choice([20, 24]),
        page_bytes=r.choice([32, 4096]),
        large_round_bytes=r.choice([2 * MIB, 2 * MIB, 3 * MIB]),
    )


def _bfc(r: random.Random) -> BfcConfig:
    return BfcConfig(
        fragmentation_fraction=r.choice([0.0, 0.0, 0.01, 0.1]),
        garbage_collection=r.random() < 0.7,
        allow_growth=r.random() < 0.9,
    )


def _cnmem(r: random.Random) -> CnmemConfig:
    pool_bytes = r.choice([0, 30 * MIB, 90 * MIB])
    return CnmemConfig(pool_bytes=pool_bytes, grows=not pool_bytes or r.random() < 0.7)


def _two_ended(r: random.Random) -> TwoEndedConfig:
    if r.random() < 0.2:
        return TwoEndedConfig(learns=True)
    return TwoEndedConfig(pool_bytes=r.choice([None, 0, 1000, 30 * MIB, 90 * MIB]), grows=r.random() < 0.7)


def _planned(r: random.Random) -> PlannedConfig:
    return PlannedConfig(background=r.random() < 0.1)


_CONFIGS: dict[str, Callable[[random.Random], Any]] = {
    "pytorch": _caching,
    "tensorflow": _bfc,
    "mxnet": _mxnet,
    "planned": _planned,
    "chainer": lambda r: ChainerConfig(limit_bytes=r.choice([0, 0, 50 * MIB])),
    "cnmem": _cnmem,
    "gtbm": _two_ended,
    "chunked": lambda r: ChunkedConfig(chunk_bytes=r.choice([2, 2, 6, 40]) * MIB),
    "best-fit": lambda r: BestFitConfig(step_bytes=r.choice([1, 512, 512, 1000])),
    "buddy": lambda r: BuddyConfig(least_bytes=r.choice([1, 512]), segment_bytes=r.choice([2 * MIB, 16 * MIB, 4096])),
}


def _random_events(r: random.Random) -> Events:
    """Up to 120 events of any size, on up to 3 streams, half of them of a few sizes only.

    Some are elastic or of no bytes, and now and then all blocks are freed.
    """
    rows: list[tuple[int, int, int, int]] = []
    live: list[int] = []
    largest = r.choice([12, 20, 24, 26])
    few = [int(2 ** r.uniform(8, largest)) for _ in range(4)]
    frees = r.choice([0.3, 0.45, 0.5])
    for i in range(r.choice([20, 60, 120])):
        if r.random() < 0.02:
            rows += [(1, block, 0, 0) for block in live]
            live.clear()
        if live and r.random() < frees:
            rows.append((1, live.pop(r.randrange(len(live))), 0, 0))
            continue
        nbytes = r.choice(few) if r.random() < 0.5 else int(2 ** r.uniform(0, largest))
        rows.append((2 if r.random() < 0.3 else 0, i, nbytes if r.random() > 0.02 else 0, r.choice([0, 0, 1, 2])))
        live.append(i)
    hints = random.Random(len(rows))
    return Events.from_rows(rows, [hints.choice(list(Mobility)) for _ in rows])


@pytest.fixture
def random_case() -> Callable[[str, int], tuple[Events, Any, int | None]]:
    """`random_case(name, seed)`: events, a configuration of that allocator, and a capacity."""

    def case(name: str, seed: int) -> tuple[Events, Any, int | None]:
        r = random.Random(seed)
        events = _random_events(r)
        capacity = r.choice([None, 20 * MIB, 64 * MIB, 101 * MIB + 5, 300 * MIB, 500 * MIB])
        config = _CONFIGS[name](r)
        if isinstance(config, BfcConfig) and not config.allow_growth and capacity is None:
            capacity = 200 * MIB  # it takes the whole device, so there must be one
        return events, config, capacity

    return case
