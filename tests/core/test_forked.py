"""Work in a copy of this process: what it is asked for reaches it, its result comes back, a failure is none."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from overspill.core import forked
from overspill.core.forked import Forked, can_fork, copied, is_copy
from overspill.core.progress import progress, progress_to


def test_the_copy_works_beside_this_process_and_returns_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_PAUSE_SECONDS", 0.0)

    def work(ask: Callable[[], int]) -> Iterator[tuple[int, int]]:
        progress("half of it")
        yield os.getpid(), 2 * ask()

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
    def work(ask: Callable[[], int]) -> Iterator[int]:
        yield 1 // ask()

    with Forked(work) as under_way:
        assert under_way.result(0) is None
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fails_at", [None, 0, 2])
def test_results_come_from_a_copy_and_from_where_it_failed_on_from_here(
    monkeypatch: pytest.MonkeyPatch, fails_at: int | None
) -> None:
    monkeypatch.setattr(forked, "can_fork", lambda: True)

    def work() -> Iterator[tuple[int, bool]]:
        for number in range(4):
            if is_copy() and number == fails_at:
                raise RuntimeError
            yield number, is_copy()

    with copied(work) as found:
        assert [next(found) for _ in range(4)] == [(n, fails_at is None or n < fails_at) for n in range(4)]


def test_only_a_command_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_fork()
    with copied(lambda: iter([is_copy()])) as found:
        assert [*found] == [False]
    monkeypatch.setattr(forked, "_may_be_copied", True)
    assert can_fork() == (len(os.sched_getaffinity(0)) > 1)
    monkeypatch.setattr(forked, "_is_copy", True)
    assert not can_fork()
