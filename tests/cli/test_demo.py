"""`overspill demo`: a saving that was measured, equal numbers, and commands that work as they are printed."""

from __future__ import annotations

import shlex
import webbrowser
from pathlib import Path

import pytest
import torch
from tests.cli.commands import Overspill

from overspill.cli import demo
from overspill.core.units import format_bytes
from overspill.report.demo import NEXT


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODEL", "nets:deep")
    monkeypatch.setattr(demo, "BATCH", 512)
    monkeypatch.setattr(demo, "STEPS", 2)


def test_it_trains_in_its_budget_with_equal_numbers(overspill: Overspill, quick: None) -> None:
    threads = torch.get_num_threads()
    answer = overspill("demo --json").answer
    assert answer["identical"] is True
    assert answer["losses"] == answer["reference_losses"]
    assert answer["measured_peak_bytes"] <= answer["budget_bytes"]
    assert answer["offloaded_bytes"] or answer["recomputed_ops"]
    assert torch.get_num_threads() == threads
    assert not list(Path().glob("*.html"))
    page = Path(answer["report"]).read_text(encoding="utf-8")
    for said in (format_bytes(answer["reference_peak_bytes"]), "the same numbers to the last bit", '"Losses"'):
        assert said in page


@pytest.mark.parametrize(
    ("is_terminal", "display", "seen"), [(True, "DISPLAY", True), (True, "", False), (False, "DISPLAY", False)]
)
def test_a_page_opens_only_where_somebody_can_see_it(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, display: str, seen: bool
) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    if display:
        monkeypatch.setenv(display, ":0")
    monkeypatch.setattr(demo.sys, "platform", "linux")
    monkeypatch.setattr(demo.sys, "stdout", type("Terminal", (), {"isatty": lambda _: is_terminal})())
    assert demo._has_display() == seen


@pytest.mark.long
def test_at_its_real_size_it_takes_less_than_half_of_the_memory(
    overspill: Overspill, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    done = overspill("demo --no-open")
    assert done.code == 0
    assert "identical" in done.out
    assert opened == []
    assert len(done.out.splitlines()) < 20
    answer = overspill("demo --json").answer
    assert answer["measured_peak_bytes"] < answer["reference_peak_bytes"] / 2
    assert answer["losses"][-1] < answer["losses"][0]


@pytest.mark.long
@pytest.mark.parametrize("command", NEXT)
def test_what_it_says_to_try_next_works(overspill: Overspill, command: str) -> None:
    program, *arguments = shlex.split(command)
    done = overspill(*arguments)
    assert program == "overspill"
    assert done.code in (0, 1)  # 1: a job that does not fit, and what would help
    assert len(done.out.splitlines()) > 10
