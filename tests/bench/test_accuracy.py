"""Estimates stay as good as they are claimed to be, on jobs that were measured on GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEFINITIONS = ROOT / "build" / "definitions" / ".ready"


needs_definitions = pytest.mark.skipif(
    not DEFINITIONS.exists(), reason="needs the networks' definitions: make definitions"
)


@pytest.mark.long
@needs_definitions
def test_the_jobs_run_with_the_releases_that_were_measured() -> None:
    file = Path(__file__).with_name("test_ground_truth_jobs.py")
    environment = os.environ | {"OVERSPILL_GROUND_TRUTH_ALONE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", file]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.long
@needs_definitions
def test_the_measured_jobs_are_estimated_within_the_limits(tmp_path: Path) -> None:
    found = tmp_path / "accuracy.json"
    command = [sys.executable, ROOT / "bench" / "estimate_accuracy.py", "--only", "xmem", "--json", found]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows = json.loads(found.read_text())["rows"]
    errors = sorted(abs(row["error"]) for row in rows if row["error"] is not None)
    assert len(rows) == 58
    assert errors[len(errors) // 2] <= 0.02
    assert sum(errors) / len(errors) <= 0.03
    assert errors[int(0.9 * len(errors))] <= 0.08
    assert errors[-1] <= 0.17
    inside = [
        row["low_bytes"] <= row["measured_bytes"] <= row["high_bytes"] for row in rows if row["error"] is not None
    ]
    assert 0.85 <= sum(inside) / len(inside) <= 0.97
    assert all(row["verdict_right"] for row in rows)
