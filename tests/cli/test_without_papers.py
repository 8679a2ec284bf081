"""Where overspill-papers is not installed: its names say what to install, and all else is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from overspill.core.text import pip_install

pytestmark = pytest.mark.long

ALONE = """
import contextlib, importlib.metadata, io, json, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: importlib.metadata.EntryPoints(
    point for point in found(**asked) if not point.value.startswith("overspill_papers")
) if asked else found()
sys.modules["overspill_papers"] = None
from overspill.cli import main
answers = []
for command in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(command.split())
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""
REFUSED = {
    "reproduce vdnn --table fig1": "the command 'reproduce'",
    "reproduce": "the command 'reproduce'",
    "plan alexnet --batch 4 --small --policy vdnn-all:m": "the policy 'vdnn-all'",
    "estimate alexnet --batch 4 --small --allocator tensorflow": "the allocator 'tensorflow'",
    "plan googlenet --batch 4": "the model 'googlenet'",
    "estimate alexnet --batch 4 --small --allocator cnmem": "the allocator 'cnmem'",
    "pack blocks.csv --solver mip": "the solver 'mip'",
    "plan densenet121 --batch 4": "the model 'densenet121'",
    "estimate --mxnet net.json --batch 4 --input data=N,3": "the framework 'mxnet'",
    "estimate --onnx net.onnx --batch 4": "the framework 'onnx'",
    "estimate --tensorflow net:model --batch 4": "the framework 'tensorflow'",
}
WORKING = (
    "--help",
    "models",
    "policies",
    "compare alexnet --small --batch 2 --gpu t4 --policies liveness --placers pytorch",
)


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str, str]]:
    """What one process without overspill-papers says to all commands: exit code, output and errors."""
    commands = [*REFUSED, *WORKING]
    done = subprocess.run([sys.executable, "-c", ALONE, *commands], capture_output=True, text=True, check=True)
    return dict(zip(commands, map(tuple, json.loads(done.stdout)), strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_what_it_has_is_one_line_that_says_what_to_install(
    command: str, answers: dict[str, tuple[int, str, str]]
) -> None:
    code, out, err = answers[command]
    said = f"error: {REFUSED[command]} needs the overspill-papers package: {pip_install('papers')}"
    assert (code, out, err.splitlines()[-1]) == (2, "", said)


@pytest.mark.parametrize("command", WORKING)
def test_what_it_has_not_works(command: str, answers: dict[str, tuple[int, str, str]]) -> None:
    code, out, err = answers[command]
    assert (code, "reproduce" in out, "Traceback" in err) == (0, False, False)
