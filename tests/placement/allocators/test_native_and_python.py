"""The native core does exactly what its oracle in Python does: 6 000 random traces (a quarter of them in the short suite), compared in every number."""

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.placement.allocators.caching_oracle import CachingAllocator
from tests.placement.allocators.chunked_oracle import ChunkedAllocator
from tests.placement.allocators.two_ended_oracle import TwoEndedAllocator

from overspill.placement import ALLOCATORS, Events, Replay, replay
from overspill.placement.allocators import _native, base
from overspill.placement.allocators.base import Allocator
from overspill.placement.allocators.native_allocator import NativeAllocator
from overspill.placement.replay import replay_on

MIB = 1 << 20
TRACES = 6_000
PARTS = 4
ORACLES: dict[str, type[Allocator]] = {
    "pytorch": CachingAllocator,
    "chunked": ChunkedAllocator,
    "gtbm": TwoEndedAllocator,
}
OTHERS = ("planned",)
"""Native allocators whose oracle is what must hold of them: test_planned.py."""
Case = Callable[[str, int], tuple[Events, Any, int | None]]


def differences(one: Replay, other: Replay) -> list[str]:
    """The names of the fields in which two replays differ."""
    return [f.name for f in fields(Replay) if not np.array_equal(getattr(one, f.name), getattr(other, f.name))]


@pytest.mark.short("0-pytorch", "0-gtbm")
@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_the_two_agree_in_addresses_statistics_logs_and_failures(name: str, part: int, random_case: Case) -> None:
    each = TRACES // len(ORACLES) // PARTS
    failures = skipped = retries = 0
    for seed in range(part * each, (part + 1) * each):
        events, config, capacity = random_case(name, seed)
        if getattr(config, "learns", False):
            continue  # its oracle is what must hold of it: test_planned.py
        request = 2**20 if seed % 2 else None
        config = ALLOCATORS[name].settled(config, lambda first: replay(events, name, config=first, request_bytes=0))  # noqa: B023
        oracle = ORACLES[name](config, capacity_bytes=capacity)
        python = replay_on(oracle, events, curves=True, request_bytes=request)
        core = replay(events, name, capacity_bytes=capacity, config=config, curves=True, request_bytes=request)
        assert differences(python, core) == [], seed
        # Call by call it is the same, and so are the segments in the end.
        stepped = ALLOCATORS[name](config, capacity_bytes=capacity)
        assert differences(replay_on(stepped, events, curves=True, request_bytes=request), core) == [], seed
        assert stepped.segments() == oracle.segments()
        failures += not python.fits
        skipped += python.skipped
        retries += python.retries
    # The traces are worth something: they meet the limit in every way.
    assert failures > each // 100
    assert skipped > each // 100
    assert (retries > 0) == (name != "gtbm")  # with known mobilities it gives nothing back


def test_the_native_core_has_what_its_stub_has() -> None:
    stub = ast.parse(Path(base.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    assert {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)} <= vars(_native).keys()
    (stepper,) = (node for node in stub.body if isinstance(node, ast.ClassDef))
    assert {node.name for node in stepper.body if isinstance(node, ast.FunctionDef)} <= vars(_native.Stepper).keys()


def test_every_native_allocator_has_an_oracle_and_a_name() -> None:
    native = {kind.core for kind in ALLOCATORS.values() if issubclass(kind, NativeAllocator)}
    assert set(_native.names()) == native == {*ORACLES, *OTHERS}
