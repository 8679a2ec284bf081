"""The rehearsal on the stand-in GPU: `make gpu-rehearsal`. Anywhere else only what needs no CUDA build is collected."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "native/tests/gpu_stand_in"))
IS_THERE = "OVERSPILL_ON_STAND_IN" in os.environ
collect_ignore_glob = [] if IS_THERE else ["test_on_*.py"]
ABOUT = (
    "A rehearsal, no measurement of a GPU: PyTorch's CUDA build on a stand-in whose memory is host memory and whose "
    "kernels do nothing. Times are host times."
)


class Record:
    """What the checks found, for one file; checks that were not run keep what stood there."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self.checks: dict[str, Any] = {}

    def rows(self, check: str) -> list[Any]:
        return self.checks.setdefault(check, [])

    def write(self) -> None:
        if self._path is None or not self.checks:
            return
        earlier = json.loads(self._path.read_text()) if self._path.exists() else {}
        import torch

        versions = {
            "torch": torch.__version__, "cuda": torch.version.cuda,
            "python": platform.python_version(), "numpy": version("numpy"),
        }  # fmt: skip
        checks = dict(sorted((earlier.get("checks", {}) | self.checks).items()))
        found = {"about": ABOUT, "versions": versions, "checks": checks}
        self._path.write_text(json.dumps(found, indent=1) + "\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, default=None, help="write what the checks of the rehearsal found there")


@pytest.fixture(scope="session")
def record(request: pytest.FixtureRequest) -> Any:
    found = Record(request.config.getoption("--record"))
    yield found
    found.write()
