"""A driver without a GPU for what loads libcuda.so.1: that of the stand-in GPU, which needs no CUDA headers for this part."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parents[3] / "native/tests/gpu_stand_in"
COMPILER = shutil.which("c++") or shutil.which("g++")


def build_driver(folder: Path) -> dict[str, str]:
    """Build libcuda.so.1 in `folder`; the environment in which it is found, with a card of 256 MiB and slow events."""
    assert COMPILER is not None
    sources = [SOURCES / "driver.cpp", SOURCES / "card.cpp"]
    subprocess.run([COMPILER, "-std=c++20", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", *sources], check=True)
    return {"LD_LIBRARY_PATH": str(folder), "STAND_IN_CARD_BYTES": str(256 << 20), "STAND_IN_LOOKS": "2"}
