"""The check for races itself, on logs by hand: it needs no CUDA build and runs with the ordinary tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from stand_in import ENTRY, KINDS
from tests.gpu_rehearsal.mutants import IN, MUTANTS, OUT, each_wait_once, lane, waits
from tests.gpu_rehearsal.races import find_races

COMPUTE, OUTWARD, INWARD = 1, 100, 200
X, SLOT = 0x10000, 0x90000
SIZE = 64


def log_of(*rows: tuple[Any, ...]) -> Any:
    """Rows of (kind, stream, first, second, bytes, label), of which what is left out is 0."""
    filled = [(*row, *(0,) * (6 - len(row))) for row in rows]
    return np.array([(KINDS.index(k), label, s, a, b, n) for k, s, a, b, n, label in filled], dtype=ENTRY)


WRITE = ("access", COMPUTE, X, 1, SIZE)
READ = ("access", COMPUTE, X, 0, SIZE)
LEAVES = ("copy", OUTWARD, SLOT, X, SIZE, OUT)
ARRIVES = ("copy", INWARD, X, SLOT, SIZE, IN)


def after(waiting: int, awaited: int, event: int) -> list[tuple[Any, ...]]:
    return [("record", awaited, event), ("wait", waiting, event)]


def swap(event: int) -> list[tuple[Any, ...]]:
    """A tensor leaves, its memory is written by another, and it comes back to the same place."""
    return [
        WRITE,
        *after(OUTWARD, COMPUTE, event), LEAVES, *after(COMPUTE, OUTWARD, event + 1),
        WRITE, READ,
        *after(INWARD, COMPUTE, event + 2), ARRIVES, *after(COMPUTE, INWARD, event + 3),
        READ,
    ]  # fmt: skip


def test_a_correct_swap_has_no_race() -> None:
    found = find_races(log_of(*swap(10), *swap(20)))
    assert found.races == []
    assert found.accesses == 2 * (4 + 4)


@pytest.mark.parametrize("waiting", [OUTWARD, COMPUTE, INWARD])
def test_every_single_wait_of_a_swap_is_missed(waiting: int) -> None:
    log = log_of(*swap(10), *swap(20))
    for awaited in {OUTWARD, COMPUTE, INWARD} - {waiting}:
        for one in each_wait_once(log, waiting, awaited, most=2):
            assert find_races(one).races


def test_reads_and_neighbours_do_not_race() -> None:
    assert not find_races(log_of(READ, LEAVES)).races
    assert not find_races(log_of(("access", COMPUTE, X + SIZE, 1, SIZE), LEAVES)).races
    assert find_races(log_of(("access", COMPUTE, X + SIZE - 1, 1, SIZE), LEAVES)).races == [(0, 1)]
    assert not find_races(log_of(WRITE, ("copy", COMPUTE, SLOT, X, SIZE))).races  # one stream


@pytest.mark.parametrize("sync", ["stream_done", "device_done", "event_done", "free"])
def test_what_the_host_knows_orders_what_it_launches(sync: str) -> None:
    row = (sync, 0 if sync == "event_done" else OUTWARD, 10)
    assert not find_races(log_of(LEAVES, ("record", OUTWARD, 10), row, WRITE)).races
    assert find_races(log_of(LEAVES, ("record", OUTWARD, 10), WRITE, row)).races == [(0, 2)]


def test_an_event_stands_for_what_came_before_it() -> None:
    assert find_races(log_of(("record", OUTWARD, 10), LEAVES, ("wait", COMPUTE, 10), WRITE)).races == [(1, 3)]
    again = (LEAVES, ("record", OUTWARD, 10), ("wait", COMPUTE, 10), WRITE)
    assert not find_races(log_of(("record", OUTWARD, 10), *again)).races


@pytest.mark.parametrize("mutant", [name for name in MUTANTS if "slot" not in name])
def test_mutants_of_a_correct_log_race(mutant: str) -> None:
    log = log_of(*swap(10), *swap(20))
    assert (lane(log, OUT), lane(log, IN)) == (OUTWARD, INWARD)
    assert len(waits(log, COMPUTE, OUTWARD)) == 2
    assert find_races(MUTANTS[mutant](log, COMPUTE)).races


def test_a_slot_that_is_given_out_while_it_is_read_races_on_the_host() -> None:
    other = ("copy", OUTWARD, SLOT + SIZE, X + SIZE, SIZE, OUT)
    log = log_of(ARRIVES, ("record", INWARD, 10), other, ("wait", COMPUTE, 10), READ)
    assert not find_races(log).races
    assert find_races(MUTANTS["a slot is given out again before its last reader is done"](log, COMPUTE)).races == [
        (0, 2)
    ]
