"""The line that a terminal shows while a step is planned: it goes away, and files and commands never have it."""

from __future__ import annotations

import io
import sys

import pytest

from overspill.core.progress import progress, progress_to, progress_under, shown_in_terminal, tell_terminal


class Screen(io.StringIO):
    def __init__(self, *, is_terminal: bool) -> None:
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def work() -> None:
    tell_terminal("no budget")
    with shown_in_terminal("planning"), shown_in_terminal("within it"):
        progress("a plan")
        with progress_under("none"):
            progress("another")


def test_a_terminal_shows_what_is_done_until_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal=True))
    work()
    lines = screen.getvalue().replace("\x1b[K", "").split("\r")
    assert [line for line in lines if line] == [
        "overspill: no budget\n", "overspill: planning", "overspill: planning: a plan",
        "overspill: planning: none", "overspill: planning: none: another",
    ]  # fmt: skip
    assert screen.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("is_terminal", "rank", "by_command"), [(False, "0", False), (True, "1", False), (True, "0", True)]
)
def test_others_have_no_such_line(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, rank: str, by_command: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Screen(is_terminal=is_terminal))
    monkeypatch.setenv("LOCAL_RANK", rank)
    told: list[str] = []
    if by_command:
        with progress_to(told.append):
            work()
    else:
        work()
    assert screen.getvalue() == ""
    assert told == (["a plan", "none", "none: another"] if by_command else [])


def test_long_work_without_a_terminal_logs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "stderr", Screen(is_terminal=False))
    clock = iter((0.0, 1.0, 12.0, 13.0))
    monkeypatch.setattr("overspill.core.progress.time.monotonic", lambda: next(clock))
    with shown_in_terminal("planning the step"):
        for now in ("a plan", "another", "a third"):
            progress(now)
    assert caplog.messages == ["planning the step takes more than 10 s (another)"]
