"""What commands say while they work: how much is done on a terminal, lines without one, nothing with `--quiet`."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from tests.cli.commands import Overspill

from overspill.cli.narrator import Narrator, progress_on


def said(console: Console) -> str:
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.fixture
def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)


def test_a_terminal_shows_how_much_is_done_and_the_time_left(terminal: Console) -> None:
    now = [0.0]
    with progress_on(terminal) as progress:
        progress.get_time = lambda: now[0]
        narrator = Narrator(terminal, progress)
        narrator.parts(4)
        for name in ("[auto]", "window", "dymem"):
            narrator.part(f"planning {name}")
            progress.refresh()
            now[0] += 10.0
        shown = said(terminal)
    assert "planning [auto]" in shown, "what looks like markup is none"
    assert "0/4" in shown
    assert "2/4, 0:20 left" in shown
    assert "3/4" not in shown, "the third has only begun"


def test_what_is_limited_in_time_says_how_much_of_it_is_left(terminal: Console) -> None:
    now = [0.0]
    with progress_on(terminal) as progress:
        progress.get_time = lambda: now[0]
        narrator = Narrator(terminal, progress)
        narrator.at_most(90.0)
        now[0] = 15.0
        progress.refresh()
        assert "1:15 left at most" in said(terminal)
        narrator.parts(None)
        narrator.now("drawing")
        progress.refresh()
        assert said(terminal).splitlines()[-1].rstrip().endswith("drawing")


def test_without_a_terminal_all_is_lines() -> None:
    console = Console(file=io.StringIO())
    narrator = Narrator(console, None)
    narrator.parts(2)
    narrator.part("planning auto")
    narrator.now("a moment", lasting=False)
    narrator.done()
    narrator.at_most(1.0)
    assert said(console) == "planning auto\n"


@pytest.mark.parametrize("words", ["--quiet compare {}", pytest.param("compare {} --quiet", marks=pytest.mark.long)])
def test_quiet_says_nothing_wherever_it_stands(words: str, overspill: Overspill) -> None:
    done = overspill(words.format("nets:shallow --batch 4 --policies liveness"))
    assert (done.code, done.err) == (0, "")
    assert "liveness" in done.out


def test_quiet_still_says_what_is_wrong(overspill: Overspill) -> None:
    done = overspill("plan alexnut --batch 2 --quiet")
    assert done.code == 2
    assert done.err.startswith("error: unknown model 'alexnut'")


@pytest.mark.long
def test_a_scripts_arguments_are_its_own(overspill: Overspill) -> None:
    with open("script.py", "w", encoding="utf-8") as script:  # noqa: PTH123 - the directory is the test's own
        script.write("import sys\nprint(sys.argv)\n")
    done = overspill("estimate --script script.py -- --quiet")
    assert "running script.py" in done.err, "that `--quiet` is not ours"
