"""`overspill run`: run a script with another allocator for its CUDA memory."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from overspill.core.errors import RequestError

from .common import Outcome, optional

Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="A file, or a module by its dotted name.", show_default=False)
]
Arguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGUMENTS", help="What the script gets.", show_default=False)
]
Allocator = Annotated[
    str,
    optional(
        "NAME",
        "planned (solved from two recorded steps), chunked (2 MiB pieces behind virtual addresses) or gtbm (two ends)."
        "  [default: planned]",
    ),
]

START = "import sys; from overspill.runtime.allocator import run_script; run_script(*sys.argv[1:3], sys.argv[3:])"


def run(script: Script, arguments: Arguments = None, allocator: Allocator = "planned") -> Outcome:
    """Run a CUDA training script as it is, with less fragmentation: each repeated step gets planned addresses.

    For jobs whose reserved memory is far above what is allocated. Not tried on a GPU yet (docs/allocator.md).
    """
    from overspill.runtime.allocator import check_live

    check_live(allocator)
    if not Path(script).is_file() and (script.endswith(".py") or find_spec(script.partition(".")[0]) is None):
        raise RequestError(f"there is no file and no module {script}; name what `python` would run")
    given = arguments or []
    if given[:1] == ["--"]:
        given = given[1:]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-c", START, allocator, script, *given])  # noqa: S606 - the script is the process
