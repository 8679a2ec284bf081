"""The jobs that people bring train with the bits they should have, or are refused as is known; and what is wrong is seen."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from job_processes import each
from job_trials import CRASH, IDENTICAL, NOT_INSTALLED, OTHER_BITS, PLAIN_FAILS, REFUSED, UNPLANNED, Outcome, judge
from jobs_by_field import JOBS
from jobs_by_field.job import Job
from jobs_by_field.known import KNOWN, OVER, Known
from jobs_by_field.ways import WAYS, Steps, Way

ROOT = Path(__file__).parents[2]
QUICK = (
    ("simclr", "train_step"), ("experts-switch", "compile"), ("branch", "train_step"),
)  # fmt: skip
"""Those that do not wait for the long suite, of many fields."""
CASES = [
    pytest.param(name, way, id=f"{name}-by-{way}", marks=[] if (name, way) in QUICK else [pytest.mark.long])
    for name in JOBS
    for way in WAYS
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_job_trains_with_the_same_bits_or_is_refused_as_is_known(name: str, way: str) -> None:
    if missing := JOBS[name].missing:
        pytest.skip(f"{', '.join(missing)} not installed: make jobs-libraries")
    JOBS[name].load()
    found = judge(JOBS[name], way)
    known = KNOWN.get((name, way))
    if known is None or (known.varies and found.kind == IDENTICAL):
        known = Known(IDENTICAL, "", "")
    assert (found.kind, found.error) == (known.kind, known.error), found
    assert found.over_bytes == 0 or (name, way) in OVER, found


# -- what is wrong is seen


def small(way: Way) -> Steps:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    return way.train(model, lambda model, x: model(x).mean(), [torch.randn(64, 8) for _ in range(2)])


def judged(trains=small, way: str = "compile") -> Outcome:
    return judge(Job("small", "tests", "a small job", trains, (), 0), way)


@torch.no_grad()
def nudged(_: Way, model: nn.Sequential) -> nn.Sequential:
    """The model with another last bit in each of some weights."""
    model[0].weight.copy_(torch.nextafter(model[0].weight, torch.ones(1)))
    return model


@pytest.fixture
def nothing_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, "compile", (Way, lambda _: Way()))


@pytest.mark.usefixtures("nothing_planned")
def test_a_model_that_is_not_planned_is_seen() -> None:
    assert judged().kind == UNPLANNED


def test_another_last_bit_is_seen_with_its_size_and_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "plans", [object()])
    monkeypatch.setattr(Way, "called", nudged)
    monkeypatch.setitem(WAYS, "compile", (type("Plain", (Way,), {"called": lambda _, model: model}), lambda _: Way()))
    found = judged()
    assert found.kind == OTHER_BITS
    assert found.said.startswith("in step 0 ")
    assert " by " in found.said


def test_what_a_step_takes_beyond_the_budget_is_measured() -> None:
    def takes_more(way: Way) -> Steps:
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        return way.train(model, lambda model, x: model(x).mean() + torch.zeros(2**18).mean(), [torch.randn(64, 8)])

    assert 2**19 < judged(takes_more).over_bytes < 2**20


def test_numbers_that_are_drawn_and_not_used_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Way, "plans", [object()])
    drawing = type("Drawing", (Way,), {"together": lambda *_: torch.randn(1)})
    monkeypatch.setitem(WAYS, "compile", (Way, lambda _: drawing()))

    def draws(way: Way) -> Steps:
        for loss in small(way):
            way.together()
            yield loss

    assert judged(draws).said.endswith("generator is another")


def test_what_is_refused_and_what_crashes_are_told_apart() -> None:
    def takes_data_apart(way: Way) -> Steps:
        model = nn.Linear(8, 1)
        return way.train(model, lambda model, x: model(x).mean() * float(model(x).sum()), [torch.randn(4, 8)])

    def fails(way: Way) -> Steps:
        if type(way) is not Way:
            raise ValueError("a line\nand another")
        yield from small(way)

    refused = judged(takes_data_apart, "train_step")
    assert (refused.kind, refused.error) == (REFUSED, "UnsupportedError")
    crashed = judged(fails)
    assert (crashed.kind, crashed.error, crashed.said) == (CRASH, "ValueError", "a line and another")


def test_what_plain_pytorch_refuses_too_is_no_fault() -> None:
    def fails(way: Way) -> Steps:
        return way.train(nn.Linear(8, 1), lambda model, x: model(x).sum(), [torch.randn(4, 9)])

    assert judged(fails).kind == PLAIN_FAILS


# -- processes


def slept(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


def ended(status: int) -> None:
    os._exit(status)


def test_each_call_has_a_process_and_one_that_ends_or_hangs_is_told() -> None:
    assert dict(each([(0.0,), (0.1,)], slept, 2, 30.0)) == {(0.0,): 0.0, (0.1,): 0.1}
    assert list(each([(3,)], ended, 1, 30.0)) == [((3,), "the process ended with 3")]
    assert list(each([(30.0,)], slept, 1, 0.1)) == [((30.0,), "no answer in 0 s")]


# -- the record


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.delitem(sys.modules, "jobs", raising=False)
    return importlib.import_module("jobs")


def test_the_record_and_what_is_known_agree(jobs: ModuleType) -> None:
    found = {(o.job, o.way): o for o in jobs.read(ROOT / "bench" / "results" / "jobs.json")}
    assert found.keys() <= {(name, way) for name in JOBS for way in WAYS}
    for case, outcome in found.items():
        known = KNOWN.get(case)
        assert outcome.kind == (known.kind if known else IDENTICAL), outcome
        assert outcome.error == (known.error if known else ""), outcome


def test_what_is_known_is_of_jobs_that_there_are_and_has_a_reason() -> None:
    assert all(name in JOBS and way in WAYS for name, way in {*KNOWN, *OVER})
    for known in KNOWN.values():
        assert known.kind in (REFUSED, OTHER_BITS, CRASH, PLAIN_FAILS)
        assert known.reason


def test_the_page_shows_the_record(jobs: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    jobs.print_record(ROOT / "bench" / "results" / "jobs.json")
    record = capsys.readouterr().out.strip()
    assert record in (ROOT / "bench" / "jobs.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "jobs.md").read_text(encoding="utf-8")
    assert record.split("\n\n")[0] in page
    not_identical = [job for (job, way), known in KNOWN.items() if way in ("compile", "train_step")]
    assert [job for job in not_identical if f"`{job}`" not in page] == []


def test_a_record_is_written_added_to_and_printed(
    jobs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jobs.json"
    for name, way in (("vae", "compile"), ("dqn", "train_step")):
        monkeypatch.setattr(jobs, "judge", lambda job, way: replace(Outcome.of(job, way, REFUSED, "a line"), error="E"))
        monkeypatch.setattr("sys.argv", ["jobs.py", "--jobs", name, "--ways", way, "--json", str(out)])
        jobs.main()
    assert [row["job"] for row in json.loads(out.read_text())["jobs"]] == ["vae", "dqn"]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["jobs.py", "--read", str(out)])
    jobs.main()
    assert "- `vae`, `compile`: refused: a line" in capsys.readouterr().out


@pytest.mark.long
def test_first_steps_are_recorded_beside_what_is_there_and_told_over_those_of_stock(
    jobs: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "jobs.json"
    others = {"job": "vit", "layers": 12, "side": "plain", "seconds": 1.0, "cpu_seconds": 1.0}
    out.write_text(json.dumps({"first_steps": [others]}))
    monkeypatch.setattr(jobs, "_load", lambda _: None)
    monkeypatch.setattr(
        jobs, "first_step", lambda _, side: {"seconds": 9.0 if side == "compile" else 10.0, "cpu_seconds": 4.0}
    )
    asked = ["--first-step", "--jobs", "gpt2", "--ways", "compile", "--rounds", "1", "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["jobs.py", *asked])
    jobs.main()
    first, *rows = json.loads(out.read_text())["first_steps"]
    assert first == others
    assert [row["side"] for row in rows] == ["plain", "torch.compile", "torch.compile of the loss", "compile"]
    assert "| 10.0 s, CPU 4.0 s | 9.0 s (0.90), CPU 4.0 s (1.00) | not run |" in capsys.readouterr().out


def test_a_job_whose_library_is_missing_is_told(jobs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(JOBS["vae"], needs=("a_library_that_nobody_has",))
    options = type("Options", (), {"processes": 1, "seconds": 1.0, "verbose": False})()
    (found,) = jobs.outcomes([(job, "compile")], options)
    assert (found.kind, found.said) == (NOT_INSTALLED, "a_library_that_nobody_has")
