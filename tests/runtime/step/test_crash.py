"""Whatever system call a training is killed at, or is told has failed: nothing is lost, left behind, or trained wrongly."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.step.crash import CALLS, HUNG_SECONDS, KILL, Rule, can_watch, run_watched

from overspill.core.files import write_whole

pytestmark = pytest.mark.skipif(not can_watch(), reason="the kernel asks nobody for system calls")
ALL = 10**9


def results(*asked: str) -> list[dict[str, Any]]:
    """What `crash_jobs.py` finds: `KIND:MOST:JOB`."""
    # One thread, and blocks from 64 KiB on that the C library maps one by one, so that each can be refused.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.runtime.step.crash_jobs", *asked],
        env=environment, cwd=Path(__file__).parents[3], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert found
    return found


def check_killed(found: dict[str, Any]) -> None:
    # Towards the end, a run that makes fewer calls than the one they were counted in may not come to the last ones.
    assert found["code"] in (-9, 0), found
    assert not found["hung"], found
    assert not found["wrong"], found
    named = [name for name in found["left"] if name != "checkpoint"]
    assert len(named) <= 1, found
    assert all(re.fullmatch(r"\.overspill-\w+\.part", name) for name in named), found


def check_failed(found: dict[str, Any]) -> None:
    assert found["code"] == 0, found  # else numbers were wrong, or it was never over
    assert not found["hung"], found
    assert not found["left"], found
    for line in found["said"].split("\n"):
        # Python's own error is what it is where there was no memory to make a plan.
        assert re.match(r"(ours: |other: MemoryError|$)", line), found
        assert found["error"] != "EINTR" or not line, found


def check_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        (check_failed if "call" in one else check_killed)(one)
    failures = [one for one in found if "call" in one]
    assert sum(bool(one["met"]) for one in failures) >= 0.9 * len(failures)  # not all: runs differ a little
    kills = [one for one in found if "call" not in one]
    assert sum(bool(set(one["left"]) - {"checkpoint"}) for one in kills) <= max(2, len(kills) // 20)
    assert not kills or sum(one["code"] == -9 for one in kills) > 0.8 * len(kills)


@pytest.mark.long
def test_a_training_that_is_stopped_at_some_system_calls_is_not_lost() -> None:
    check_all(
        results(
            "kill:4:train_step, disk", "kill:2:compile, disk",
            "quick errors:1:train_step, many rows",
        )
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("job", ["train_step, disk", "train_step, host", "compile, disk"])
def test_a_training_can_be_killed_at_every_system_call_of_a_step(job: str) -> None:
    found = results(f"kill:{ALL}:{job}")
    check_all(found)
    assert len(found) > 50


@pytest.mark.long
@pytest.mark.parametrize("job", ["train_step, disk", "compile, disk"])
def test_a_training_can_be_killed_from_its_first_system_call_on(job: str) -> None:
    check_all(results(f"kill in all:120:{job}"))


@pytest.mark.long
@pytest.mark.parametrize(
    "job", ["train_step, disk", "train_step, host", "train_step, many rows", "compile, disk"]
)  # fmt: skip
def test_system_calls_that_fail_end_in_one_error_of_ours_and_the_right_numbers(job: str) -> None:
    check_all(results(f"errors:6:{job}"))


def kill_while_writing(path: Path, content: str) -> list[tuple[str, list[str]]]:
    """What is at `path`, and what lies beside it, after its writer was killed at each system call in turn."""
    rule, found = Rule(), []

    def child(at: int) -> None:
        rule.set(watches=True, at=at, error=KILL)
        write_whole(path, content)
        rule.rest()

    before = path.read_text() if path.exists() else None
    for at in range(1, 1000):
        ended = run_watched(lambda at=at: child(at), rule)
        beside = sorted(p.name for p in path.parent.iterdir() if p != path)
        found.append((path.read_text() if path.exists() else "", beside))
        for name in beside:
            assert (path.parent / name).read_text() == content
            (path.parent / name).unlink()
        path.unlink(missing_ok=True)
        if before is not None:
            path.write_text(before)
        if ended.code == 0:
            return found
        assert ended.code == -9, ended.said
    raise AssertionError("it makes no end")


def test_a_file_that_is_written_is_the_old_or_the_new_one_whenever_it_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    new = kill_while_writing(path, "new " * 5000)
    path.write_text("old")
    over = kill_while_writing(path, "new " * 5000)
    for before, found in (("", new), ("old", over)):
        assert {content for content, _ in found} == {before, "new " * 5000}
        assert found[-1] == ("new " * 5000, [])
        assert sum(bool(beside) for _, beside in found) <= 1  # between the last two calls: a whole one without its name


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    path, rule = tmp_path / "plan.json", Rule()
    for name, error in (("write", errno.ENOSPC), ("linkat", errno.EIO), ("rename", errno.EIO), ("fchmod", errno.EPERM)):
        path.write_text("old")

        def child(name: str = name, error: int = error) -> None:
            rule.set(number=CALLS[name], at=1, error=error, watches=True)
            write_whole(path, "new")

        ended = run_watched(child, rule)
        assert rule.met == 1, name
        assert f"RequestError: cannot write {path}: {os.strerror(error)}" in ended.said, ended.said
        assert path.read_text() == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_a_child_that_hangs_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.runtime.step.crash.HUNG_SECONDS", 0.2)
    assert HUNG_SECONDS > 1
    reader, _writer = os.pipe()
    ended = run_watched(lambda: os.read(reader, 1), Rule())
    assert ended.hung
    assert ended.code == -9
