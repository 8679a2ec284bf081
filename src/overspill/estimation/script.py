"""Run a training script briefly on a GPU that is not there.

As its user has it, for a few iterations.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from overspill.capture.recording.recording import Recording
from overspill.core.errors import RequestError
from overspill.job import Script

from .api import Setting, of_recording
from .estimate import Estimate
from .programs import ITERATIONS
from .script_process import client
from .script_process.confine import WAYS
from .script_process.request import Ended, Request

TIME_LIMIT = 600.0
"""Seconds that a script has, if its user says nothing."""


@dataclass(frozen=True)
class ScriptRun:
    """A script's device memory in its first iterations.

    There are `iterations`, rounds of all its optimizers. `trains` is false where it only ran models; an iteration is
    then a call of one. `steps` counts the steps of the `optimizers` (names of classes), `calls` those of models on the
    device. `finished` says that the script ended by itself. `notes` are for the user: what the recording does not have.
    """

    name: str
    recording: Recording
    iterations: int
    trains: bool
    steps: int
    calls: int
    optimizers: tuple[str, ...]
    finished: bool
    notes: tuple[str, ...]


def record_script(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    iterations: int = ITERATIONS,
    capability: tuple[int, int] = (8, 0),
    memory_bytes: int = 1 << 40,
    output_to_stderr: bool = False,
    time_limit: float = TIME_LIMIT,
    allow_writes: bool = False,
    whole_steps: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> ScriptRun:
    """The recording of `script` on a virtual GPU.

    It runs as `python script arguments…` would; the GPU has `memory_bytes`. `script` is a file, or a module's dotted
    name as `python -m` takes it. It runs in a process of its own, and is ended after that many iterations, or
    `time_limit` seconds. Files that it changes are changed for itself alone, or it is refused to, unless
    `allow_writes`. Of gradients that are accumulated many times before a step, and of evaluation, what repeats itself is left
    out; with `whole_steps`, of evaluation alone. With `output_to_stderr`, what it prints goes to standard error. Where it takes long, `tell` is
    called with where it is.

    Raises RequestError for what is wrong with the script or raised by it, where it does not use `cuda`, and where its
    time is over before it has; UnsupportedError, naming the line, where it cannot go on without computed values.
    """
    if iterations < 1:
        raise RequestError(f"iterations={iterations} is not a positive number; give 1 or more")
    if not time_limit > 0:
        raise RequestError(f"time_limit={time_limit:g} is not a positive number of seconds; give some, as 600")
    request = Request(
        str(script), tuple(arguments), iterations, capability, memory_bytes, time_limit,
        () if allow_writes else WAYS, str(Path.cwd()), dict(os.environ), whole_steps,
    )  # fmt: skip
    ended, left = client.run(request, output_to_stderr=output_to_stderr, tell=tell)
    if isinstance(left, BaseException):
        raise left
    if left is None:
        raise RequestError(f"{_way_to_end(ended, str(script), time_limit)}, before it had trained on cuda")
    found: ScriptRun = left
    return found


def of_script(
    script: Script, setting: Setting, tell: Callable[[str], None], *, quiet: bool, whole_steps: bool = False
) -> tuple[Estimate, ScriptRun]:
    """The estimate of a script that runs for a few steps on a virtual GPU, and what it did.

    `tell` gets notes on what the recording does not have; `quiet`: what the script prints goes to standard error. Raises
    what `record_script` raises.
    """
    started = time.perf_counter()
    done = record_script(
        script.path, script.arguments, iterations=script.iterations, capability=setting.capability,
        memory_bytes=setting.device.memory_bytes, output_to_stderr=quiet, time_limit=script.time_limit,
        allow_writes=script.allow_writes, whole_steps=whole_steps, tell=tell,
    )  # fmt: skip
    for note in done.notes:
        tell(note)
    made = of_recording(done.recording, done.name, setting)
    return replace(made, seconds=time.perf_counter() - started), done


def _way_to_end(ended: Ended, script: str, time_limit: float) -> str:
    """How a script's process ended without an answer."""
    if ended.still_at is not None:
        seconds = f"{time_limit:g} seconds (--time-limit)"
        return f"{ended.still_at} was still running after {seconds}, in code that is not Python"
    if ended.code < 0:
        return f"{script} was ended by {signal.Signals(-ended.code).name}"
    return f"{script} became another program, or ended in code that is not Python, with exit code {ended.code}"
