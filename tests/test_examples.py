"""Every example runs as it stands."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

RECIPES = ("09_hf_trainer", "10_lightning", "11_accelerate", "16_fine_tune")  # held to what they print by other tests
ROOT = Path(__file__).parents[1]
LIBRARIES = ROOT / "build/definitions/loops"  # of `make loops-libraries`
FOUR_BITS = ROOT / "examples/18_four_bits.py"
FOUND = sorted((ROOT / "examples").glob("[0-9]*.py"))
EXAMPLES = [path for path in FOUND if path.stem not in RECIPES and path != FOUR_BITS]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3


@pytest.mark.long
def test_weights_of_four_bits_train_within_a_budget(tmp_path: Path) -> None:
    if find_spec("bitsandbytes") is None and not (LIBRARIES / "bitsandbytes").is_dir():
        pytest.skip("make loops-libraries installs bitsandbytes")
    there = {"PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(LIBRARIES))))}
    example = [sys.executable, str(FOUR_BITS)]
    done = subprocess.run(example, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | there)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("identical: True\n")
