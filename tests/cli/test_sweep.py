"""`overspill sweep`: its contract, its answer for a reader, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.cli.commands import Overspill
from tests.cli.test_contract import assert_units

from overspill.devices import load_device

SWEEP = "sweep nets:shallow --batch 512 --points 3"


def test_a_sweep_gives_a_share_that_plan_takes(overspill: Overspill) -> None:
    done = overspill(f"{SWEEP} --policies auto,liveness --json")
    answer = done.answer
    assert done.code == 0
    assert_units(answer)
    auto = [row for row in answer["rows"] if row["policy"] == "auto"]
    assert auto[0]["budget_bytes"] == answer["unmanaged_peak_bytes"]
    assert auto[0]["slowdown"] == pytest.approx(1.0)
    assert auto[-1]["budget_bytes"] >= answer["floors"][0]["floor_bytes"]
    assert all(row["lower_bound_seconds"] <= row["step_seconds"] for row in auto)
    share = f"{100 * auto[-1]['budget_share']:.1f}%"
    plan = overspill(f"plan nets:shallow --batch 512 --budget {share} --json").answer
    for key in ("budget_bytes", "peak_bytes", "step_seconds"):
        assert plan[key] == auto[-1][key]


@pytest.mark.long
def test_on_a_gpu_the_share_of_a_row_gives_plan_its_plan(overspill: Overspill) -> None:
    rows = overspill("sweep alexnet --batch 64 --gpu t4 --points 4 --json").answer["rows"]
    for row in rows:
        share = f"{100 * row['budget_share']:.1f}%"
        plan = overspill(f"plan alexnet --batch 64 --gpu t4 --budget {share} --json").answer
        for key in ("budget_bytes", "peak_bytes", "step_seconds"):  # but of the card's bytes: a row has its own pool
            assert plan[key] == row[key]


def test_a_reader_sees_the_curve_and_what_holds_it_up(overspill: Overspill) -> None:
    done = overspill(f"{SWEEP} --report page.html")
    assert done.code == 0
    assert "report saved to page.html" in done.out
    assert "What less memory costs" in Path("page.html").read_text(encoding="utf-8")
    text = " ".join(done.out.split())
    assert "nets:shallow, batch 512, float32, sgd on cpu, at every budget: simulated" in text
    assert text.endswith("overspill plan nets:shallow --batch 512 --policy auto --budget smallest")
    assert "100.0 %" in text
    assert "times as long" in text
    assert "auto: not below" in text
    first, second, *_, last = done.err.splitlines()
    assert (first, second) == ("capturing nets:shallow for cpu", "planning the smallest of auto")
    assert last.startswith("proving the bound within ")


@pytest.mark.parametrize("command", ["plan", "compare --policies liveness", "sweep --policies liveness --points 2"])
def test_of_several_micro_batches_figures_are_of_the_last_and_are_told_so(overspill: Overspill, command: str) -> None:
    words = f"{command} nets:shallow --batch 4 --accumulate 3"
    assert overspill(f"{words} --json").answer["figures_of"] == "the last of 3 micro-batches"
    text = " ".join(overspill(words).out.split())
    assert ("the last of 3 micro-batches" if command == "plan" else "3 micro-batches, figures of the last") in text
    assert overspill(f"{command} nets:shallow --batch 4 --json").answer["figures_of"] == "a step"


@pytest.mark.long
def test_where_no_budget_fits_the_device_the_answer_is_no(overspill: Overspill, tmp_path: Path) -> None:
    tiny = replace(load_device("t4"), name="tiny", memory_bytes=150 << 20)
    tiny.save(tmp_path / "tiny.json")
    done = overspill(f"{SWEEP} --gpu tiny.json --points 2 --json")
    assert done.code == done.answer["exit_code"] == 1
    assert "infeasible: no budget fits the 150.0 MiB of tiny" in done.error
    assert {row["fits"] for row in done.answer["rows"]} == {False}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--points 1", "1 is too few for a sweep"),
        ("--policies lifeness", "unknown policy 'lifeness'"),
        ("--gpu titan-z", "unknown device 'titan-z'"),
    ],
)
def test_a_wrong_request_is_refused_before_work_begins(overspill: Overspill, options: str, said: str) -> None:
    done = overspill(f"sweep alexnet --batch 2 {options} --json")
    assert done.code == 2
    assert said in done.error
    assert "capturing" not in done.err
