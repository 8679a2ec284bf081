"""Where overspill-papers is not installed: its names say what to install, and all else is there."""

from __future__ import annotations

import subprocess
import sys

import pytest

ALONE = """
import importlib.metadata, sys
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: importlib.metadata.EntryPoints(
    point for point in found(**asked) if not point.value.startswith("overspill_papers")
)
sys.modules["overspill_papers"] = None
from overspill.cli import main
sys.exit(main(sys.argv[1:]))
"""


def alone(command: str) -> tuple[int, str, str]:
    done = subprocess.run([sys.executable, "-c", ALONE, *command.split()], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("reproduce vdnn --table fig1", "the command 'reproduce'"),
        ("reproduce", "the command 'reproduce'"),
        ("plan alexnet --batch 4 --small --policy vdnn-all:m", "the policy 'vdnn-all'"),
        ("estimate alexnet --batch 4 --small --allocator tensorflow", "the allocator 'tensorflow'"),
        ("plan googlenet --batch 4", "the model 'googlenet'"),
        ("estimate --mxnet net.json --batch 4 --input data=N,3", "the framework 'mxnet'"),
        ("estimate --onnx net.onnx --batch 4", "the framework 'onnx'"),
        ("estimate --tensorflow net:model --batch 4", "the framework 'tensorflow'"),
    ],
)
def test_what_it_has_is_one_line_that_says_what_to_install(command: str, what: str) -> None:
    code, out, err = alone(command)
    said = f"error: {what} needs the overspill-papers package: pip install overspill[papers]"
    assert (code, out, err.splitlines()[-1]) == (2, "", said)


@pytest.mark.parametrize(
    "command", ["--help", "models", "policies", "compare alexnet --small --batch 2 --gpu t4 --placement"]
)
def test_what_it_has_not_works(command: str) -> None:
    code, out, err = alone(command)
    assert (code, "reproduce" in out, "Traceback" in err) == (0, False, False)
