"""`overspill plan --report`: a page of the plan, and one where there is none."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import MODELS, Overspill

from overspill.bounds.step_time import lower_bound_seconds
from overspill.cli.narrator import Narrator
from overspill.core import forked
from overspill.devices import load_device
from overspill.estimation.api import of_job
from overspill.plans import plan
from overspill.policies import POLICIES
from overspill.runtime import preview


def test_a_page_is_written_where_the_plan_fits_and_where_none_does(overspill: Overspill) -> None:
    done = overspill("plan nets:shallow --batch 2 --report page.html")
    assert (done.code, "report saved to page.html" in done.out) == (0, True)
    text = Path("page.html").read_text(encoding="utf-8")
    assert '"text":"Fits in ' in text
    assert '"is":"Step"' in text
    done = overspill("plan nets:shallow --batch 2 --budget 1KiB --report none.html")
    assert (done.code, done.out) == (1, "")
    text = Path("none.html").read_text(encoding="utf-8")
    assert '"text":"Does not fit in 1.0 KiB"' in text
    assert '"label":"the least that works"' in text


def test_progress_names_the_layer_and_the_plan(overspill: Overspill, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(Narrator, "detail", lambda _, text: told.append(text))
    assert overspill("plan nets:shallow --batch 2 --whole-step").code == 0
    layers = [f"capturing {number}" for number in range(8)]
    assert [text for text in told if text in layers][:8] == layers
    assert any(text.startswith("a plan of ") for text in told)


@pytest.mark.long
def test_the_bound_on_the_time_of_a_step_is_proved_only_where_it_is_shown(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved: list[int] = []

    def bound(*given: Any) -> float:
        proved.append(1)
        return lower_bound_seconds(*given)

    monkeypatch.setattr(plan, "lower_bound_seconds", bound)
    assert overspill("plan nets:shallow --batch 2 --out plan.json --plot plot.png").code == 0
    assert not proved
    assert "lower bound" in overspill("plan nets:shallow --batch 2 --verbose").out
    assert overspill("plan nets:shallow --batch 2 --json").answer["lower_bound_seconds"] > 0
    assert len(proved) == 2


@pytest.mark.long
def test_what_a_job_takes_without_a_plan_is_estimated_in_a_copy_of_the_process(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_copy(*asked: Any, **how: Any) -> Any:
        assert forked.is_copy()
        return of_job(*asked, **how)

    monkeypatch.setattr(forked, "can_fork", lambda: True)
    monkeypatch.setattr(preview, "estimate_of", in_copy)
    asked = "lstm --small --batch 2 --gpu t4 --json"
    planned = overspill(f"plan {asked}").answer
    made = overspill(f"estimate {asked}").answer
    assert planned["unmanaged_device_bytes"] == made["total_bytes"]
    assert 0.979 * made["capacity_bytes"] < planned["budget_bytes"] <= 0.98 * made["capacity_bytes"]


def test_the_largest_tensors_have_the_lines_that_made_them(overspill: Overspill) -> None:
    tanh = 1 + MODELS.splitlines().index("        return torch.tanh(x)")
    done = overspill("plan nets:lined --batch 4096 --json")
    sources = {row["name"]: row["source"] for row in done.answer["peak_tensors"]}
    assert sources["tanh"] == f"nets.py:{tanh} forward"
    (given,) = (row["source"] for row in done.answer["peak_tensors"] if row["kind"] == "input")
    assert given is None, "what is there before the step is made by no line of it"
    assert f"nets.py:{tanh} forward" in overspill("plan nets:lined --batch 4096 --verbose").out
    done = overspill("compare nets:lined --batch 4096 --policies in-core --json")
    assert f"nets.py:{tanh} forward" in {row["source"] for row in done.answer["rows"][0]["peak_tensors"]}


def test_a_report_that_can_be_no_page_is_refused_before_work_begins(overspill: Overspill) -> None:
    for name, why in (("page.pdf", "must end in .html"), ("no/page.html", "there is no directory no")):
        done = overspill(f"plan nets:shallow --batch 2 --report {name}")
        assert (done.code, done.out) == (2, "")
        assert why in done.error
    assert not Path("page.pdf").exists()


@pytest.mark.long
def test_a_gpu_without_units_for_bfloat16_is_told(overspill: Overspill) -> None:
    for command in ("plan", "estimate"):
        told = " ".join(overspill(f"{command} nets:shallow --batch 2 --dtype bf16 --gpu t4").out.split())
        assert "t4 has no units for it (compute capability 7.5)" in told
        assert "no units" not in overspill(f"{command} nets:shallow --batch 2 --dtype bf16 --gpu l4").out


@pytest.mark.long
def test_a_share_of_the_step_that_the_card_has_no_room_for_does_not_fit(overspill: Overspill) -> None:
    replace(load_device("t4"), name="tiny", memory_bytes=200 << 20).save("tiny.json")
    done = overspill("plan nets:shallow --batch 1000000 --budget 100% --gpu tiny.json --report page.html --json")
    assert done.code == done.answer["exit_code"] == 1
    assert done.answer["feasible"] is False
    assert done.answer["device_bytes"] > 200 << 20
    assert "does not fit tiny" in done.error
    assert '"text":"The step does not fit tiny' in Path("page.html").read_text(encoding="utf-8")


def test_a_package_that_cannot_be_loaded_leaves_the_other_policies(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint("theirs", "no_such_package:Policy", "overspill.policies")
    monkeypatch.setitem(POLICIES.__dict__, "_entry_points", {"theirs": broken})
    done = overspill("policies")
    assert done.code == 0
    assert "auto" in done.out
    assert "policy 'theirs' of the package no_such_package:Policy cannot be loaded" in " ".join(done.out.split())
    compared = overspill("compare nets:shallow --batch 2 --gpu t4 --json")
    assert compared.code == 0
    assert "left out: policy 'theirs' of the package" in " ".join(compared.err.split())
    assert "theirs" not in {row["policy"] for row in compared.answer["rows"]}


@pytest.mark.short("estimate")
@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_what_a_module_alone_is_taken_to_read_is_said_once(command: str, overspill: Overspill) -> None:
    asked = f"{command} nets:forward_alone --batch 4"
    done = overspill(asked)
    assert done.code == 0
    said = "nets:forward_alone returns a module alone: a sample is taken to be 8 of float32, as its first layer reads"
    assert done.err.count(said) == 1
    assert "the mean of its squared outputs" in done.err
    assert "return (module, make_batch, loss)" in done.err
    assert not overspill(f"{asked} --quiet").err
    assert "is taken to be" not in overspill(f"{command} nets:deep --batch 4").err


def test_the_largest_batch_for_so_much_more_time_is_found(overspill: Overspill) -> None:
    done = overspill("plan nets:shallow --batch 8 --budget 200KiB --most-slowdown 50% --json")
    found = done.answer
    assert found["batch"] > 8
    assert "planning batch 8, to find the largest\nplanning batch 16, to" in done.err
    assert f"planning batch {found['batch']}, the largest\n" in done.err
    assert found["slowdown"] <= 1.5
    told = overspill(f"plan nets:shallow --batch {found['batch']} --budget 200KiB --most-slowdown 50%").out
    assert re.search(
        rf"largest batch +{found['batch']} +with at most 50% more time; its step takes [\d.]+ % more\n", told
    )
    larger = overspill(f"plan nets:shallow --batch {found['batch'] * 5 // 4} --budget 200KiB --json").answer
    assert not larger["feasible"] or larger["slowdown"] > 1.5
    assert "no batch has a plan" in overspill("plan nets:shallow --batch 8 --budget 9KiB --most-slowdown 1%").error
    assert "a share as 1%" in overspill("plan nets:shallow --batch 8 --most-slowdown 2GiB").error
