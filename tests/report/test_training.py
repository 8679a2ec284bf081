"""A run's report says in words whether the numbers are those of plain training, and where they part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.report.test_plan import plan, shown, step
from tests.simulate.graphs import DEVICE

from overspill.core.units import format_seconds
from overspill.job import Job, NamedModel
from overspill.plans.plan import make_plan
from overspill.report.page import Lines, Step
from overspill.report.terminal import in_terminal
from overspill.report.training import Trained, training_page
from overspill.runtime.options import Options
from overspill.runtime.training import Run


def run(
    losses: tuple[float, ...] = (2.0, 1.5, 1.25), bias: float = 0.0, seconds: tuple[float, ...] = (9.0, 1.0, 0.5)
) -> Run:
    state = {"weight": torch.ones(2), "bias": torch.full((2,), bias)}
    return Run(list(losses), list(seconds), measured_peak_bytes=100 << 10, state=state, offloaded_bytes=64 << 10)


def trained(reference: Run | None = None) -> Trained:
    job = Job(NamedModel("toy [bold]"), 4)
    return Trained(job, Options(store="disk"), "cpu", run(), plan(), reference)


def test_without_a_reference_nothing_is_said_of_identity() -> None:
    result = trained()
    assert result.identical is None
    assert "identical" not in shown(in_terminal(training_page(result)))


def test_the_picture_comes_first_and_last_the_lines_that_train_so() -> None:
    page = training_page(trained())
    assert isinstance(page.sections[0], Step)
    assert page.next[0].text.startswith("model = overspill.compile(")


def test_equal_numbers_are_said_to_be_identical_with_the_count_of_tensors() -> None:
    text = shown(in_terminal(training_page(trained(run()))))
    assert (
        "identical: losses and all 2 tensors of weights and buffers are equal to plain PyTorch to the last bit" in text
    )


@pytest.mark.parametrize(
    ("reference", "difference"),
    [
        (lambda: run(losses=(2.0, 1.5, 1.0)), "the loss of step 3 is 1.25, not 1.0, and 0 of 2 tensors"),
        (lambda: run(bias=-0.0), "the losses are equal, and 1 of 2 tensors of weights and buffers differ (bias)"),
    ],
)
def test_different_numbers_are_located(reference: Callable[[], Run], difference: str) -> None:
    result = trained(reference())
    assert result.identical is False
    assert difference in result.difference
    said = " ".join(shown(in_terminal(training_page(result))).split())
    assert f"but with other numbers: {result.difference}" in said


def test_the_report_sets_the_measured_peak_against_budget_and_unmanaged_peak() -> None:
    result = trained()
    text = shown(in_terminal(training_page(result), "plan saved to [x].json"))
    for said in ("100.0 KiB   9.8 % of the budget", "120.0 KiB   planned, the run took 83.3 % of it"):
        assert said in text
    assert "each step moved 64.0 KiB to the disk store and recomputed nothing" in text
    assert "toy [bold], batch 4" in text
    assert "plan saved to [x].json" in text


def test_simulated_times_say_whether_this_cpu_was_calibrated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OVERSPILL_CACHE", str(tmp_path))
    assert "`overspill calibrate` measures this one" in training_page(trained()).notes[-1]
    (tmp_path / "cpu.json").touch()
    assert "calibrate" not in training_page(trained()).notes[-1]


def test_of_a_disk_that_is_not_used_nothing_is_said() -> None:
    device = replace(DEVICE, host_bytes=1 << 20, disk_read_bytes_per_second=1e5, disk_write_bytes_per_second=1e5)
    said = []
    for host_bytes in (1 << 20, 1):
        made = make_plan(step(), replace(device, host_bytes=host_bytes), "vdnn-all", 1 << 20)
        page = training_page(replace(trained(), plan=made))
        said.append({figure.label: figure.note for figure in page.verdict.figures})
    assert [one["host memory"] for one in said] == ["of 1.0 MiB", "of 1 B, 64.0 KiB on the disk"]
    assert ["written to the disk each step" in one for one in said] == [False, True]


def test_the_usual_step_is_not_the_one_that_compiles() -> None:
    assert "usual step 750.0 ms" in shown(in_terminal(training_page(trained())))


@pytest.mark.parametrize(
    ("seconds", "usual", "said"),
    [
        ([9.0], 9.0, "the only step, with planning and compiling"),
        ([9.0, 1.0], 1.0, "the second step; the first plans and compiles"),
        ([9.0, 5.0, 1.0], 3.0, "the median of the steps after the first, which plans and compiles"),
        ([9.0, 5.0, 1.0, 2.0], 2.0, "the median of the steps after the first, which plans and compiles"),
    ],
)
def test_the_time_of_a_step_leaves_out_the_first_and_says_so(seconds: list[float], usual: float, said: str) -> None:
    result = replace(trained(), managed=replace(run(), step_seconds=seconds))
    page = training_page(result)
    figure = next(f for f in page.verdict.figures if f.label == "usual step")
    assert (figure.value, figure.note) == (format_seconds(usual), f"measured, {said}")
    times = next(s for s in page.sections if isinstance(s, Lines) and s.title == "Time of each step")
    assert [(mark.name, mark.at) for mark in times.marks] == [("usual step", usual)]
    assert times.y.name == "step time"


def test_the_page_sets_a_run_beside_plain_training_where_that_was_measured() -> None:
    reference = replace(run(seconds=(9.0, 0.5, 0.5)), measured_peak_bytes=400 << 10)
    figures = {figure.label: figure for figure in training_page(trained(reference)).verdict.figures}
    assert (figures["slowdown"].value, figures["slowdown"].note) == ("1.500", "measured, 500.0 ms without Overspill")
    assert figures["unmanaged peak"].value == "400.0 KiB"
    assert "25.0 % of it" in figures["unmanaged peak"].note
    assert "slowdown" not in {figure.label for figure in training_page(trained()).verdict.figures}


@pytest.mark.parametrize(
    ("placement", "shown_by"), [(None, "pytorch"), ("best-fit", "best-fit"), ("planned", "portfolio")]
)
def test_the_page_shows_blocks_where_a_simulation_puts_them_also_of_a_live_pool(
    placement: str | None, shown_by: str
) -> None:
    page = training_page(replace(trained(), options=Options(store="disk", placement=placement)))
    step = next(section for section in page.sections if isinstance(section, Step))
    assert [run.placer for run in step.runs] == [shown_by] * 2
