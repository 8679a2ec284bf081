"""`--whole-step` on the command line: exact runs, what is said of them, and what is refused."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from tests.cli.commands import Overspill

from overspill.costs import MeasuredTimes

TRAIN = "train nets:shallow --batch 8 --whole-step --store host --steps 2 --json"


@pytest.mark.short(
    "--optimizer adamw --budget 50%",
    "--optimizer momentum --budget 60% --clip-norm 0.01 --clip-value 0.001 --accumulate 2",
)
@pytest.mark.parametrize(
    "words",
    [
        "--optimizer adamw --budget 50%",
        "--optimizer sgd --budget 60% --accumulate 4 --checksum",
        "--optimizer momentum --budget 60% --clip-norm 0.01 --clip-value 0.001 --accumulate 2",
    ],
)
def test_a_whole_step_trains_within_its_budget_with_the_numbers_of_plain_pytorch(
    overspill: Overspill, words: str
) -> None:
    done = overspill(f"{TRAIN} {words} --check")
    answer = done.answer
    assert done.code == 0
    assert answer["identical"] is True
    assert answer["losses"] == answer["reference_losses"]
    assert (answer["whole_step"], answer["checksum"]) == (True, "--checksum" in words)
    measured, planned = answer["measured_peak_bytes"], answer["planned_peak_bytes"]
    assert measured <= planned <= answer["budget_bytes"]
    assert planned <= 1.02 * measured
    assert answer["stored_bytes"] > 0
    assert answer["offloaded_bytes"] > 0
    assert answer["budget_bytes"] < answer["reference_peak_bytes"]


def test_without_whole_step_nothing_is_in_the_store_between_steps(overspill: Overspill) -> None:
    answer = overspill("train nets:shallow --batch 8 --steps 1 --store host --json").answer
    assert (answer["whole_step"], answer["stored_bytes"]) == (False, 0)


@pytest.mark.long
def test_a_reader_sees_what_is_in_the_store_and_what_waits_for_the_norm(overspill: Overspill, store_dir: Path) -> None:
    words = "nets:shallow --batch 8 --whole-step --optimizer adamw --budget 50% --clip-norm 1"
    for done in (overspill(f"plan {words} --verbose"), overspill(f"train {words} --steps 1 --store-dir {store_dir}")):
        text = " ".join(done.out.split())
        assert done.code == 0
        assert "whole step, gradients clipped to norm 1" in text
        assert "between steps the store has optimizer state" in text
        # 4 linear layers of 64 x 64 + 64 numbers of four bytes
        assert "waits for the gradients of all parameters, which takes 65.0 KiB on the device or in the store" in text
    assert not list(store_dir.iterdir())


def test_a_model_larger_than_the_budget_is_said_to_have_been_on_the_device_before(overspill: Overspill) -> None:
    done = overspill("train nets:shallow --batch 8 --whole-step --budget 60KiB --steps 1 --store host")
    assert "before it the model, as it was built, had 65.0 KiB on the device" in " ".join(done.out.split())


def test_plan_and_run_of_a_whole_step_agree(overspill: Overspill) -> None:
    words = "nets:shallow --batch 8 --whole-step --optimizer momentum --budget 60% --json"
    planned, trained = overspill(f"plan {words}").answer, overspill(f"train {words} --steps 1 --store host").answer
    assert planned["whole_step"] is True
    assert planned["peak_bytes"] == trained["planned_peak_bytes"]
    assert planned["stored_bytes"] == trained["stored_bytes"]
    assert planned["host_bytes"] >= planned["stored_bytes"]
    assert planned["host_bytes"] % mmap.PAGESIZE == 0


@pytest.mark.long
def test_measured_op_times_of_a_whole_step_serve_its_plan(overspill: Overspill) -> None:
    assert overspill(f"{TRAIN} --profile times.json --check").answer["identical"] is True
    known = MeasuredTimes.load(Path("times.json")).seconds
    assert any(key.startswith("step.update(") for key in known)
    words = "plan nets:shallow --batch 8 --whole-step --json"
    guess, measured = (overspill(f"{words}{more}").answer for more in ("", " --times times.json"))
    assert measured["step_seconds"] != guess["step_seconds"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train nets:shallow --batch 8 --whole-step --no-set-to-none", "a step with --whole-step gives gradients back"),
        ("train nets:shallow --batch 8 --whole-step --clip-norm 0", "--clip-norm 0.0 is not a positive number"),
        ("train nets:shallow --batch 8 --whole-step --accumulate 0", "'--accumulate'"),
    ],
)  # fmt: skip
def test_a_wrong_request_is_refused(overspill: Overspill, words: str, said: str) -> None:
    done = overspill(f"{words} --json")
    assert done.code == 2
    assert said in done.error


@pytest.mark.long
def test_an_infeasible_budget_names_one_that_works(overspill: Overspill) -> None:
    refused = overspill("plan nets:shallow --batch 8 --whole-step --budget 1KiB --json")
    assert refused.code == 1
    assert refused.answer["stored_bytes"] is None
    words = (
        f"train nets:shallow --batch 8 --whole-step --steps 1 --store host --budget {refused.answer['floor_bytes']}B"
    )
    assert overspill(words).code == 0
