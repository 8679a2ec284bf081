"""Every example runs as it stands."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = ("09_hf_trainer", "10_lightning", "11_accelerate", "16_fine_tune")  # held to what they print by other tests
FOUND = sorted((Path(__file__).parents[1] / "examples").glob("[0-9]*.py"))
EXAMPLES = [path for path in FOUND if path.stem not in RECIPES]


@pytest.mark.long
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") >= 3
