"""Every command with every output stream failing: the right exit code, one line, no traceback; and names of all kinds."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.cli.commands import Overspill

from overspill.cli import main
from overspill.devices import load_device
from overspill.placement import ALLOCATE, FREE, Events
from overspill.placement.snapshot import write_snapshot
from overspill_papers.papers import Claim

OUTSIDE_FAILURE = 3
QUICK = ("models", "--version", "pack blocks.csv")
SLOW = (
    "policies",
    "devices",
    "--help",
    "snapshot run.pickle",
    "estimate alexnet --small --batch 2",
    "estimate --script script.py",
    "plan nets:shallow --batch 4",
    "compare nets:shallow --batch 4",
    "train nets:shallow --batch 4 --steps 1",
    "calibrate --out mine.json",
    "reproduce vdnn",
)
COMMANDS = (*QUICK, *(pytest.param(command, marks=pytest.mark.long) for command in SLOW))
SCRIPT = """
import torch
model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    model(torch.randn(2, 4).cuda()).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
"""


@pytest.fixture(autouse=True)
def files(own_place: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("blocks.csv").write_text("id,lower,upper,size\na,0,4,100\nb,2,6,50\n", encoding="utf-8")
    Path("script.py").write_text(SCRIPT, encoding="utf-8")
    claim = Claim("vdnn", "Fig. 1", "one", "said so", "I", 28.0, "GB", lambda _: 28.0)  # what costs nothing
    monkeypatch.setattr("overspill_papers.papers.vdnn.CLAIMS", (claim,))
    monkeypatch.setattr("overspill.runtime.calibrate.calibrate", lambda *_: load_device("t4"))
    write_snapshot("run.pickle", Events.from_rows([(ALLOCATE, 0, 3 << 20, 0), (FREE, 0, 0, 0)]))


def opened(how: str, encoding: str = "utf-8") -> Any:
    """A stream as the system gives one to a process: of a full device, a pipe that nobody reads, or closed already."""
    if how == "closed":
        return None
    if how == "ascii":
        return io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    if how == "gone":
        read, write = os.pipe()
        os.close(read)
        return os.fdopen(write, "w", encoding=encoding)
    return Path("/dev/full").open("w", encoding=encoding)


@contextlib.contextmanager
def streams(out: Any, err: Any) -> Iterator[None]:
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = out, err
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream in (out, err):
            if stream is not None and not isinstance(stream, io.StringIO):
                stream.close()  # which fails where something is left to be written


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize("how", ["full", "gone", "closed", "ascii"])
@pytest.mark.parametrize("command", COMMANDS)
def test_standard_output_that_fails(command: str, how: str, as_json: bool) -> None:
    words = [*command.split(), *(["--json"] if as_json and not command.startswith("--") else [])]
    out, err = opened(how), io.StringIO()
    with streams(out, err):
        code = main(words)
        written = out.buffer.getvalue() if how == "ascii" else b""
    lines = [line for line in err.getvalue().splitlines() if line.startswith("error: ")]
    assert "Traceback" not in err.getvalue()
    if how in ("gone", "ascii"):
        assert (code, lines) == (0, [])
        assert bool(written) == (how == "ascii")
        if as_json and written and not command.startswith("--"):
            assert isinstance(json.loads(written), dict)
    else:
        reason = {"full": "No space left on device", "closed": "it is closed"}[how]
        assert (code, lines) == (OUTSIDE_FAILURE, [f"error: cannot write to standard output: {reason}"])


@pytest.mark.parametrize("how", ["full", "gone", "closed", "ascii"])
@pytest.mark.parametrize("command", COMMANDS)
def test_standard_error_that_fails(command: str, how: str) -> None:
    out = io.StringIO()
    with streams(out, opened(how)):
        assert main(command.split()) == 0
    assert out.getvalue()


@pytest.mark.parametrize("how", ["full", "gone", "closed", "ascii"])
def test_a_mistake_keeps_its_exit_code_whatever_fails(how: str) -> None:
    with streams(opened(how), opened(how)):
        assert main(["plan", "grün", "--batch", "2", "--json"]) == 2
        assert main(["pack", "blocks.csv", "--capacity", "140"]) in (1, OUTSIDE_FAILURE)


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 3, "error: cannot write to standard output: No space left on device\n"),
        ("2>&- >&-", 3, ""),
        ("| true", 0, ""),
    ],
)
def test_in_a_process_of_its_own_nothing_comes_behind_that(redirection: str, code: int, said: str) -> None:
    shell = f"'{sys.executable}' -m overspill devices --json {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout) == (code, said, "")


# -- names

NO_UTF8, ESCAPE = os.fsdecode(b"bad\xff"), "esc\x1b[31m\u202e"
LOOP = "loop"
USES = (
    "pack {}",
    "snapshot {}",
    "plan nets:shallow --batch 2 --times {}",
    "plan nets:shallow --batch 2 --gpu {}.toml",
    "plan nets:shallow --batch 2 --out {}/x",
    "train nets:shallow --batch 2 --store-dir {}",
    "pack blocks.csv --plot {}/x.png",
    "estimate {} --batch 2",
    "plan hf:{}.json --batch 2",
)


@pytest.mark.parametrize("name", [NO_UTF8, ESCAPE, LOOP, "n" * 100_000], ids=["bytes", "escape", "loop", "long"])
@pytest.mark.parametrize("use", USES)
def test_a_name_that_is_no_file_is_one_short_harmless_line(overspill: Overspill, use: str, name: str) -> None:
    Path(LOOP).symlink_to(LOOP)
    done = overspill(*(word.format(name) for word in use.split()), "--json")
    assert done.code == 2
    assert done.error.isprintable()
    assert len(done.error) < 1500
    assert "itself failed" not in done.error
    assert done.answer == {"error": done.error.removeprefix("error: "), "exit_code": 2}
    assert done.out.isascii()


@pytest.mark.parametrize(("name", "printed"), [(NO_UTF8, r"bad\udcff"), (ESCAPE, r"esc\x1b[31m\u202e")])
def test_a_file_of_any_name_is_used_and_its_name_printed_harmlessly(
    overspill: Overspill, name: str, printed: str
) -> None:
    Path(name).write_bytes(Path("blocks.csv").read_bytes())
    assert printed in overspill("pack", name).out
    answer = overspill("pack", name, "--json", "--out", f"{name}.out").answer
    assert answer["file"] == (printed if name == NO_UTF8 else name)
    assert Path(f"{name}.out").is_file()


def test_what_torch_says_comes_without_its_cpp_frames(overspill: Overspill) -> None:
    done = overspill("estimate alexnet --batch 2 --image-size 99999999999")
    assert done.code == 2
    assert "frame #0" not in done.error
    assert len(done.error) < 400


def test_more_gpus_than_there_are_are_refused_at_once(overspill: Overspill) -> None:
    done = overspill("estimate alexnet --small --batch 2 --gpus 100000000")
    assert done.code == 2
    assert "--gpus 100000000 is more than" in done.error
