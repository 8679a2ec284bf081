"""The native core does exactly what the Python twins do: 5 000 random traces (a quarter of them in the short suite), compared in every number."""

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.placement.conftest import IN_BOTH

from overspill.core.errors import OutOfMemory
from overspill.placement import FREE, Events, Replay, allocator_named
from overspill.placement.allocators import _native, native
from overspill.placement.allocators.base import Allocator
from overspill.placement.events import COLUMNS
from overspill.placement.replay import replay_in_python, replay_natively

MIB = 1 << 20
TRACES = 5_000
PARTS = 4
NEVER_GIVE_BACK = ("gtbm",)
Case = Callable[[str, int], tuple[Events, Any, int | None]]


def differences(one: Replay, other: Replay) -> list[str]:
    """The names of the fields in which two replays differ."""
    return [f.name for f in fields(Replay) if not np.array_equal(getattr(one, f.name), getattr(other, f.name))]


def outcome(allocator: Allocator, nbytes: int, stream: int, mobility: int) -> int | str:
    """The address, or the message that there is no room."""
    try:
        return allocator.allocate(nbytes, stream, mobility)
    except OutOfMemory as error:
        return str(error)


@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.long) for part in range(1, PARTS))])
def test_the_twins_agree_in_addresses_statistics_logs_and_failures(name: str, part: int, random_case: Case) -> None:
    each = TRACES // len(IN_BOTH) // PARTS
    failures = skipped = retries = 0
    for seed in range(part * each, (part + 1) * each):
        events, config, capacity = random_case(name, seed)
        request = 2**20 if seed % 2 else None
        python = replay_in_python(events, name, capacity, config, curves=True, request_bytes=request)
        core = replay_natively(events, name, capacity, config, curves=True, request_bytes=request)
        assert differences(python, core) == [], seed
        failures += not python.fits
        skipped += python.skipped
        retries += python.retries
    # The traces are worth something: they meet the limit in every way.
    assert failures > each // 100
    assert skipped > each // 100
    assert retries > 0 or name in NEVER_GIVE_BACK


@pytest.mark.parametrize("name", IN_BOTH)
@pytest.mark.parametrize("seed", range(10))
def test_the_twins_agree_call_by_call(name: str, seed: int, random_case: Case) -> None:
    events, config, capacity = random_case(name, 10**6 + seed)
    python, core = (
        allocator_named(name, config, capacity_bytes=capacity, native=compiled) for compiled in (False, True)
    )
    live: dict[int, int] = {}
    for action, block, nbytes, *rest in zip(*(getattr(events, column) for column in COLUMNS), strict=True):
        if action != FREE:
            placed = [outcome(allocator, int(nbytes), *map(int, rest)) for allocator in (python, core)]
            assert placed[0] == placed[1]
            if isinstance(placed[0], int):
                live[int(block)] = placed[0]
        elif int(block) in live:
            address = live.pop(int(block))
            python.free(address)
            core.free(address)
        assert core.segments() == python.segments()
        assert core.reserved == python.reserved
        assert core.spread_bytes == python.spread_bytes
        assert core.usable_bytes(MIB) == python.usable_bytes(MIB)
    assert core.segment_log == python.segment_log
    assert core.clock == python.clock
    assert core.device_used_bytes == python.device_used_bytes
    assert sorted(core.live_addresses()) == sorted(python.live_addresses())


def test_the_stub_has_all_that_the_native_module_has() -> None:
    stub = ast.parse(Path(native.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    (described,) = [node for node in stub.body if isinstance(node, ast.ClassDef)]
    names = {node.name for node in described.body if isinstance(node, ast.FunctionDef)}
    names |= {str(node.target.id) for node in described.body if isinstance(node, ast.AnnAssign)}  # type: ignore[union-attr]
    built = {name for name in vars(_native.SimulatedAllocator) if not name.startswith("_")}
    assert built == names - {"__init__"}
