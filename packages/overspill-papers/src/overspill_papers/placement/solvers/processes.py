"""Runs third-party solvers in processes of their own.

Each brings libraries that clash, and may overrun its time limit.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from overspill.placement.packing.base import SolverFailed

GRACE_SECONDS = 0.5
"""Seconds that a solver may overrun before it is ended, with all that it has found."""


def ask(program: str, solver: str, request: Mapping[str, Any], seconds: float) -> Any:
    """Return the answer of the Python file `program` to `request`, both as JSON.

    None where it does not answer within `seconds`. Raises SolverFailed where it fails, which names the `solver`.
    """
    command = [sys.executable, "-P", program]
    try:
        done = subprocess.run(  # noqa: S603 - a file of ours
            command, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=max(seconds, 0)
        )
    except subprocess.TimeoutExpired:
        return None
    if done.returncode:
        raise SolverFailed(f"{solver} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout)
