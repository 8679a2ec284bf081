"""`--trace` and `--snapshot` of `plan` and `train`: files where asked, or one line before any work."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.commands import Overspill
from tests.report.tracing.format import named, read_trace

from overspill.placement.snapshot import read_snapshot

JOB = "nets:shallow --batch 64 --policy liveness --trace trace.json --snapshot blocks.pickle"


def test_a_plan_is_saved_where_asked(overspill: Overspill) -> None:
    done = overspill(f"plan {JOB}")
    assert done.code == 0
    assert "trace saved to trace.json; snapshot saved to blocks.pickle" in " ".join(done.out.split())
    processes = named(read_trace(Path("trace.json")), "process_name")
    assert processes[0] == "simulated: nets:shallow, batch 64, float32, sgd on cpu, policy liveness"
    assert read_snapshot("blocks.pickle").devices == (0,)


@pytest.mark.long
@pytest.mark.parametrize("more", ["", "--whole-step", "--backend inductor", "--backend inductor --whole-step"])
def test_a_run_is_saved_where_asked(more: str, overspill: Overspill) -> None:
    done = overspill(f"train {JOB} --steps 2 --store host --check {more}")
    assert done.code == 0, done.err
    assert "identical" in done.out
    processes = named(read_trace(Path("trace.json")), "process_name")
    assert [name.partition(":")[0] for name in processes] == ["simulated", "measured"]
    assert read_snapshot("blocks.pickle").devices == (0,)


def test_the_report_of_a_recorded_run_shows_its_last_step_as_it_was_measured(overspill: Overspill) -> None:
    done = overspill("train nets:shallow --batch 64 --steps 2 --store host --trace trace.json --report run.html")
    assert done.code == 0, done.err
    page = Path("run.html").read_text(encoding="utf-8")
    assert '"name":"measured (step 2)"' in page
    assert ", but for those that say measured" in page
    assert "the second step; the first plans and compiles" in page


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize(("option", "file"), [("--trace", "absent/file.json"), ("--snapshot", "absent/file.pickle")])
def test_what_cannot_be_written_is_said_before_work_begins(
    command: str, option: str, file: str, overspill: Overspill
) -> None:
    done = overspill(f"{command} nets:shallow --batch 4 {option} {file}")
    assert done.code == 2
    assert done.err.startswith(f"error: cannot write {file}: there is no directory absent")


@pytest.mark.parametrize(("option", "ending"), [("--trace plan.txt", ".json"), ("--snapshot plan.json", ".pickle")])
@pytest.mark.parametrize("command", ["plan", "train"])
def test_a_file_that_what_opens_it_would_not_know_is_refused(
    command: str, option: str, ending: str, overspill: Overspill
) -> None:
    done = overspill(f"{command} alexnet --small --batch 2 {option}")
    assert done.code == 2
    assert f"must end in {ending}" in done.err
