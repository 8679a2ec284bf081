"""Scripts of the rehearsal in processes of their own, each on a card of its own size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COPY_LIMIT = 4096
"""Larger copies are counted and not done: they would only take this machine's memory and time."""


def on_card(script: str, *args: object, timeout: float = 600, **variables: int) -> subprocess.CompletedProcess[str]:
    """Run a script of this folder as a module; `variables` are those of the stand-in, without their prefix."""
    given = {f"STAND_IN_{name.upper()}": str(value) for name, value in ({"copy_limit": COPY_LIMIT} | variables).items()}
    # Plans as users get them: the settings of the suite would have the search make less effort.
    environment = {name: value for name, value in os.environ.items() if name != "OVERSPILL_EFFORT"}
    return subprocess.run(
        [sys.executable, "-m", f"tests.gpu_rehearsal.{script}", *map(str, args)],
        cwd=HERE.parents[1], env=environment | given, capture_output=True, text=True, check=False, timeout=timeout,
    )  # fmt: skip


def found_on_card(script: str, *args: object, **variables: int) -> dict[str, Any]:
    """What the script printed last, as JSON. It must have ended well."""
    done = on_card(script, *args, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def tell(found: dict[str, Any]) -> None:
    """Print what `found_on_card` reads."""
    sys.stdout.write(json.dumps(found) + "\n")
