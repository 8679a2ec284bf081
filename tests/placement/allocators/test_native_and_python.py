"""The native core does exactly what the Python twin does: 5 000 random traces (a quarter of them in the short suite), compared in every number."""

import ast
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.placement.conftest import IN_BOTH

from overspill.placement import Events, Replay
from overspill.placement.allocators import _native, base
from overspill.placement.replay import replay_in_python, replay_natively

MIB = 1 << 20
TRACES = 5_000
PARTS = 4
Case = Callable[[str, int], tuple[Events, Any, int | None]]


def differences(one: Replay, other: Replay) -> list[str]:
    """The names of the fields in which two replays differ."""
    return [f.name for f in fields(Replay) if not np.array_equal(getattr(one, f.name), getattr(other, f.name))]


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
    assert retries > 0


def test_the_native_core_has_what_its_stub_has() -> None:
    stub = ast.parse(Path(base.__file__).with_name("_native.pyi").read_text(encoding="utf-8"))
    assert {node.name for node in stub.body if isinstance(node, ast.FunctionDef)} <= vars(_native).keys()
    assert set(_native.names()) == set(IN_BOTH)
