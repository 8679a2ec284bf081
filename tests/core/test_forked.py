"""Work in a copy of this process: what it is asked for reaches it, its result comes back, a failure is none."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from overspill.core import forked
from overspill.core.forked import Forked
from overspill.core.progress import progress, progress_to


def test_the_copy_works_beside_this_process_and_returns_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_PAUSE_SECONDS", 0.0)

    def work(ask: Callable[[], int]) -> tuple[int, int]:
        progress("half of it")
        return os.getpid(), 2 * ask()

    said: list[str] = []
    with progress_to(said.append), Forked(work) as under_way:
        found = under_way.result(21)
    assert found is not None
    child, twice = found
    assert (twice, said) == (42, ["half of it"])
    assert child != os.getpid()
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_work_that_fails_has_no_result(capfd: pytest.CaptureFixture[str]) -> None:
    def work(ask: Callable[[], int]) -> int:
        return 1 // ask()

    with Forked(work) as under_way:
        assert under_way.result(0) is None
    assert capfd.readouterr().err == ""
