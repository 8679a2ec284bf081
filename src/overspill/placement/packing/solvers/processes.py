"""Solvers of others in processes of their own: each brings libraries that clash, and heeds its time limit at its leisure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from overspill.placement.packing.base import SolverFailed

GRACE_SECONDS = 0.5
"""How long a solver may be late before it is ended, with all that it has found."""


def ask(program: str, solver: str, request: Mapping[str, Any], seconds: float) -> Any:
    """What the Python file `program` answers to `request`, both as JSON; None where it does not within `seconds`.

    Raises SolverFailed where it fails, which names the `solver`.
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
