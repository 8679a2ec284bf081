"""What the docs show is what commands print: stale blocks are named and rewritten, and what is measured may differ."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import overspill
from overspill.cli.doctor import build_facts

ROOT = Path(__file__).parents[2]
VERSION = f"overspill {overspill.__version__} ({build_facts()})"
PACKED = """
<!-- file blocks.csv -->
```
id,lower,upper,size
a,0,4,4096
b,2,6,4096
```

```
$ overspill pack blocks.csv
blocks.csv: 2 blocks, portfolio
…
  searched             3.21 s

The bound is proven: no layout of these blocks has a smaller peak.

What to do next
  # The blocks with their addresses:
  overspill pack blocks.csv --out placed.csv
$ overspill pack blocks.csv \\
  --capacity 6KiB
…
error: infeasible: no layout lies within 6.0 KiB (6144 bytes): blocks a (4.0 KiB), b (4.0 KiB), 8.0 KiB in all, cannot
lie together; the layout found takes {found} KiB (8192 bytes), and --capacity 8192 would do
```
"""


@pytest.fixture
def transcripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "tools")
    return importlib.import_module("transcripts")


@pytest.fixture
def page(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "page.md"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def block(*lines: str, before: str = "") -> str:
    return "\n".join(("# A page", "", *([before] if before else []), "```", *lines, "```", "", "More.", ""))


@pytest.mark.long
def test_a_page_that_shows_what_commands_print_is_left_as_it_is(transcripts: Any, page: Callable[[str], Path]) -> None:
    path = page(block("$ overspill --version", VERSION) + PACKED.format(found="8.0"))
    before = path.read_text()
    assert transcripts.main([str(path), "--write"]) == 0
    assert path.read_text() == before  # with the time that it took on another day


def test_a_stale_block_is_named_with_a_diff_and_rewritten(
    transcripts: Any, page: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = page(PACKED.format(found="9.0"))
    assert transcripts.main([str(path)]) == 1
    said = capsys.readouterr().out
    assert f"{path}:10: STALE" in said
    assert "takes 9.0 KiB" in next(line for line in said.splitlines() if line.startswith("-error"))
    assert "takes 8.0 KiB" in next(line for line in said.splitlines() if line.startswith("+error"))
    assert transcripts.main([str(path), "--write"]) == 0
    written = path.read_text()
    assert "takes 8.0 KiB (8192 bytes)" in written
    assert written.count("\n…\n") == 2


def test_slow_blocks_are_left_out_and_other_blocks_are_none_of_ours(
    transcripts: Any, page: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    slow = block("$ overspill --version", "overspill 0.0", before="<!-- slow -->")
    others = block("$ python bench/price.py", "nothing") + block("overspill pack FILE")
    path = page(slow + others)
    assert transcripts.main([str(path)]) == 0
    assert "slow, left out" in capsys.readouterr().out
    assert transcripts.main([str(path), "--all", "--write"]) == 0
    assert path.read_text() == slow.replace("overspill 0.0", VERSION) + others


def test_a_command_that_fails_is_named_and_writes_nothing(
    transcripts: Any, page: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = page(block("$ overspill --version | no-such-command", "as it was"))
    before = path.read_text()
    assert transcripts.main([str(path), "--write"]) == 1
    assert "ended with exit code 127" in capsys.readouterr().out
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("shown", "printed", "alike"),
    [
        ("planning took    1.10 s", "planning took   951.5 ms", True),
        ("simulated step   1.10 s", "simulated step   1.11 s", False),
        (
            "usual step 1.87 s (simulated 83.6 ms); plain 1.18 s; planning took 745.2 ms",
            "usual step 367.3 ms (simulated 83.6 ms); plain 164.2 ms; planning took 2.10 s",
            True,
        ),
        ("usual step 1.87 s (simulated 83.6 ms)", "usual step 1.87 s (simulated 83.5 ms)", False),
        ("  slowdown   1.24   measured, 1.18 s without", "  slowdown   1.3   measured, 9.0 ms without", True),
        ("losses 6.26471 5.0679", "losses 6.26471 5.06789", True),
        ('{"plan_seconds":1.5,"step_seconds":0.25}', '{"plan_seconds":2e-1,"step_seconds":0.25}', True),
        ('{"plan_seconds":1.5,"step_seconds":0.25}', '{"plan_seconds":1.5,"step_seconds":0.26}', False),
        ('{"step_seconds":[0.1,0.2],"seconds":4}', '{"step_seconds":[0.3,0.4],"seconds":5}', True),
        ("placed by  worst   time\n───\nbuddy  2.8 %  3.0 ms", "placed by  worst  time\n──\nbuddy  2.8 %  13.0 ms", True),
        ("placed by  worst   time\n───\nbuddy  2.8 %  3.0 ms", "placed by  worst  time\n──\nbuddy  2.9 %  3.0 ms", False),
        ("error: budget 3.0 MiB is\nbelow the floor", "error: budget 3.0 MiB is below the floor", True),
    ],
)  # fmt: skip
def test_what_the_wall_clock_says_may_differ_and_nothing_else(
    transcripts: Any, shown: str, printed: str, alike: bool
) -> None:
    one, other = (transcripts.comparable(text.splitlines()) for text in (shown, printed))
    assert (one == other) is alike


def test_of_a_measured_block_no_number_is_compared(transcripts: Any) -> None:
    remarks = frozenset({"measured"})
    one, other = (
        transcripts.comparable([f"memory bandwidth   {rate}"], remarks) for rate in ("5.542 GB/s", "999 MB/s")
    )
    assert one == other
    assert one != transcripts.comparable(["memory latency   5.542 GB/s"], remarks)


@pytest.mark.long
def test_the_reference_of_the_command_line_shows_what_commands_print(transcripts: Any) -> None:
    assert transcripts.main([str(ROOT / "docs" / "cli.md"), "--all"]) == 0
