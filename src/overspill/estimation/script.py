"""Run a training script briefly on a virtual GPU, unchanged, for a few iterations."""

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
"""The default time limit of a script, in seconds."""


@dataclass(frozen=True)
class ScriptRun:
    """A script's device memory in its first iterations."""

    name: str
    recording: Recording
    iterations: int
    """The number of rounds of all its optimizers, or of calls of a model if it does not train."""
    trains: bool
    """False if the script only ran models."""
    steps: int
    """The number of steps of the optimizers."""
    calls: int
    """The number of calls of models on the device."""
    optimizers: tuple[str, ...]
    """Class names."""
    finished: bool
    """Whether the script ended by itself."""
    notes: tuple[str, ...]
    """For the user: what the recording lacks."""


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
    """Return the recording of `script` on a virtual GPU of `memory_bytes`.

    It runs as `python script arguments…` would. `script` is a file, or a module's dotted name as in `python -m`. It
    runs in a separate process, which ends after that many iterations, or `time_limit` seconds. Its changes to files are
    visible to itself alone, or are refused, unless `allow_writes`. Repeated micro-batches before a step and repeated
    evaluation are left out; with `whole_steps`, only repeated evaluation. With `output_to_stderr`, its output goes to
    standard error. In a long run, `tell` is called with the current line.

    Raises RequestError for errors in the script or raised by it, if it does not use `cuda`, and if its time ends before
    it does. Raises UnsupportedError, naming the line, where it needs computed values.
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
    """Return the estimate of a script that runs for a few steps on a virtual GPU, and its run.

    `tell` is called with notes on data that the recording lacks. With `quiet`, the script's output goes to standard
    error. Raises the errors of `record_script`.
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
    """Return how a script's process ended without an answer."""
    if ended.still_at is not None:
        seconds = f"{time_limit:g} seconds (--time-limit)"
        return f"{ended.still_at} was still running after {seconds}, in code that is not Python"
    if ended.code < 0:
        return f"{script} was ended by {signal.Signals(-ended.code).name}"
    return f"{script} became another program, or ended in code that is not Python, with exit code {ended.code}"
