"""`overspill advise`: its keys, its exit codes, its table; and the options that name the software of a job."""

from __future__ import annotations

import pytest
from tests.cli.commands import Overspill

KEYS = {
    "model", "batch", "optimizer", "dtype", "gpus", "gpu", "capacity_bytes", "minimum_capacity_bytes", "total_bytes", "fits",
    "step_seconds", "unsimulated", "changes", "left_out", "seconds",
}  # fmt: skip
CHANGE = {
    "what", "cost", "price", "minimum_capacity_bytes", "total_bytes", "fits", "step_seconds", "unsimulated", "slowdown", "gpus", "host_bytes",
    "budget_bytes", "trainer", "python", "before",
}  # fmt: skip


@pytest.mark.long
def test_it_ranks_what_was_tried_and_plans_the_step(overspill: Overspill) -> None:
    done = overspill(
        "advise decoder:width=512,depth=4,heads=8,vocabulary=64 --batch 400 --gpu t4 --optimizer adamw --json"
    )
    answer = done.answer
    assert answer.keys() == KEYS
    assert answer["fits"] is False
    assert done.code == 0  # something fits
    assert all(change.keys() == CHANGE for change in answer["changes"])
    prices = [change["price"] for change in answer["changes"] if not change["what"].startswith("together")]
    order = ("nothing", "precision", "time", "results", "hardware")
    assert prices == sorted(prices, key=order.index)
    planned = next(change for change in answer["changes"] if change["what"].startswith("overspill."))
    assert planned["fits"] is True
    assert planned["slowdown"] >= 1
    assert planned["step_seconds"] > 0
    assert planned["minimum_capacity_bytes"] <= answer["capacity_bytes"]


@pytest.mark.long
def test_a_job_that_fits_is_told_what_takes_less(overspill: Overspill) -> None:
    done = overspill("advise gpt2 --small --batch 8 --gpu t4 --optimizer adamw")
    assert done.code == 0
    assert done.out.splitlines()[2].startswith("Fits: gpt2, batch 8, takes ")
    assert "as it is" in done.out
    assert "Needs: the smallest memory" in done.out


def test_several_gpus_are_told_apart(overspill: Overspill) -> None:
    done = overspill("advise decoder:width=512,depth=4,heads=8,vocabulary=64 --batch 400 --gpu t4,h100,rtx3060 --json")
    small, middle, large = done.answer["cards"]
    assert [card["gpu"] for card in (small, middle, large)] == ["rtx3060", "t4", "h100"]
    assert (small["fits"], large["fits"]) == (False, True)
    assert small["fits_planned"] is True
    assert small["largest_batch"] < 400 <= large["largest_batch"]
    assert small["step_seconds"] > large["step_seconds"] > 0
    assert "unknown device 't5'" in overspill("advise gpt2 --gpu t4,t5").error


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("advise gpt2", "--gpu"),
        ("advise gpt3 --gpu t4", "gpt2"),
        ("advise gpt2 --gpu t5", "unknown device 't5'"),
        ("advise gpt2 --gpu t4 --torch 1.8", "what PyTorch 1.8 takes is not known; 2.0 to 2.14 are"),
        ("estimate gpt2 --batch 1 --cuda twelve", "'twelve' is not a release of CUDA"),
        ("plan gpt2 --batch 1 --torch 2.6", "--torch and --cuda are of a GPU's job"),
        ("compare gpt2 --batch 1 --gpu t4 --torch 9.9", "what PyTorch 9.9 takes is not known"),
    ],
)
def test_what_cannot_be_is_one_clear_line(overspill: Overspill, arguments: str, says: str) -> None:
    done = overspill(arguments)
    assert done.code == 2
    assert says in done.error
    assert done.error.count("\n") <= 1


@pytest.mark.long
def test_the_software_that_is_named_is_that_of_the_answer(overspill: Overspill) -> None:
    job = "gpt2 --small --batch 8 --gpu rtx5090"  # where cuBLAS takes more since 2.12
    old, new = (
        overspill(f"estimate {job} --torch {release} --json").answer["breakdown"]["workspaces"]
        for release in ("2.6", "2.13")
    )
    assert old < new
