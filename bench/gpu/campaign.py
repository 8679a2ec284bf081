"""Runs experiments one after another, each in a process of its own, and loses nothing when one fails."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from . import lines
from .experiment import Experiment
from .lines import Line

BENCH = Path(__file__).parents[1]
ABOUT_SECONDS = 120.0
SIGNAL = "signal"
TAIL = 4000
"""So many characters of what a process printed stand in the line of an experiment that left no outcome."""


@dataclass(frozen=True)
class Campaign:
    """Experiments of a catalogue on a device, written to `out`; what `done` or `out` have already is not run again.

    `deadline_seconds` counts from `begun` (`time.monotonic()`): nothing is started that should not end before it, and what
    runs then is stopped. With `retry`, what failed or took too long is run again. `patience` is a factor on the limits of
    single experiments, for slow machines. `machine` is what lines say of device and versions; None: a process is asked.
    """

    catalogue: str
    experiments: Mapping[str, Experiment]
    out: Path
    device: str = "cuda"
    small: bool = False
    done: tuple[Path, ...] = ()
    deadline_seconds: float | None = None
    only: tuple[str, ...] = ()
    retry: bool = False
    patience: float = 1.0
    machine: Mapping[str, Any] | None = None
    begun: float = field(default_factory=time.monotonic)

    def chosen(self) -> list[Experiment]:
        """Those that were asked for and mean something on this device, in order."""
        return [
            experiment
            for name, experiment in self.experiments.items()
            if (not self.only or any(fnmatch(name, pattern) for pattern in self.only))
            and (experiment.on_cpu or self.device != "cpu")
        ]

    def left(self) -> list[Experiment]:
        """Those of them that are not finished."""
        again = (lines.FAILED, lines.TIMEOUT) if self.retry else ()
        known = lines.latest(lines.read(path for path in (*self.done, self.out) if path.exists()))
        finished = {n for n, line in known.items() if line.status in lines.FINISHED and line.status not in again}
        return [experiment for experiment in self.chosen() if experiment.name not in finished]

    def run(self, say: Callable[[str], None]) -> list[Line]:
        """Run what is left, and write a line of each; the lines. A signal to end ends the one that runs, then all."""
        written = []
        left = self.left()
        about = {} if not left else self._about() if self.machine is None else self.machine
        with _ended_by_signal():
            for experiment in left:
                if self._remaining() < experiment.seconds:
                    say(f"{experiment.name}: not started, {self._remaining():.0f} s are left")
                    continue
                line = self._line(experiment, about)
                lines.append(self.out, line)
                written.append(line)
                say(
                    f"{experiment.name}: {line.status} in {line.seconds:.1f} s"
                    + f": {lines.reason(line.error)[:200]}" * bool(line.error)
                )
                if line.status == lines.CUT:
                    break
        return written

    def _remaining(self) -> float:
        if self.deadline_seconds is None:
            return float("inf")
        return self.deadline_seconds - (time.monotonic() - self.begun)

    def _line(self, experiment: Experiment, about: Mapping[str, Any]) -> Line:
        limit, remaining = self.patience * experiment.limit_seconds, self._remaining()
        begun = time.monotonic()
        memory = about.get("device", {}).get("memory_bytes", 0)
        found = self._started(experiment.name, experiment.environment, min(limit, remaining), memory)
        if found["status"] == lines.TIMEOUT and remaining < limit:
            found |= {"status": lines.CUT, "error": "the campaign's deadline came"}
        return Line(
            experiment.name,
            found["status"],
            round(time.monotonic() - begun, 3),
            found["figures"],
            found["error"],
            about.get("device", {}),
            about.get("versions", {}),
            shlex.join(["python", *sys.argv]),
            datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _started(
        self, name: str, environment: Mapping[str, str], seconds: float, memory_bytes: int = 0
    ) -> dict[str, Any]:
        """The outcome of an experiment, or of `about`, in a process of its own that has so many seconds."""
        with tempfile.TemporaryDirectory(prefix="overspill-campaign-") as folder:
            result = Path(folder) / "result.json"
            words = [sys.executable, "-m", "gpu.child", self.catalogue, name, "--device", self.device]
            words += ["--small"] * self.small + ["--memory-bytes", str(memory_bytes), "--result", str(result)]
            words += ["--earlier", *map(str, (*self.done, self.out))]
            printed, ended = _carried_out(words, environment, seconds, Path(folder))
            outcome = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
            if "status" in outcome:
                return outcome
            status = lines.TIMEOUT if ended is None else lines.CUT if ended == SIGNAL else lines.FAILED
            ending = "" if status != lines.FAILED else f"its process ended with {ended}, without an outcome\n"
            return {"status": status, "figures": {}, "error": ending + printed[-TAIL:]} | outcome

    def _about(self) -> dict[str, Any]:
        """The device and the versions, by a process of its own, for this one must hold nothing of the GPU."""
        found = self._started("about", {}, ABOUT_SECONDS)
        driver = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
        versions = {**found.get("versions", {}), "driver": driver, "commit": commit()}
        return {"device": found.get("device", {"kind": self.device, "error": found["error"]}), "versions": versions}


def _carried_out(
    words: list[str], environment: Mapping[str, str], seconds: float, folder: Path
) -> tuple[str, int | str | None]:
    """What a process group printed, and how it ended: its exit code, SIGNAL if we were told to end, None for too late."""
    path = os.pathsep.join([str(BENCH), *filter(None, [os.environ.get("PYTHONPATH")])])
    with (folder / "printed").open("w+", encoding="utf-8", errors="replace") as printed:
        process = subprocess.Popen(
            words, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )  # fmt: skip
        ended: int | str | None
        try:
            ended = process.wait(None if seconds == float("inf") else max(seconds, 0))
        except subprocess.TimeoutExpired:
            ended = None
        except KeyboardInterrupt:
            ended = SIGNAL
        with contextlib.suppress(ProcessLookupError):  # what it has started ends with it
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        printed.seek(0)
        return printed.read(), ended


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """SIGTERM is taken as Ctrl-C is."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def commit() -> str | None:
    """The commit of this tree, with a `+` where files differ; without git what the folder of wheels says of it."""
    here = BENCH.parent
    if found := _output(["git", "-C", str(here), "rev-parse", "HEAD"]):
        return found + "+" * bool(_output(["git", "-C", str(here), "status", "--porcelain", "--untracked-files=no"]))
    said = here / "build" / "wheels" / "COMMIT"
    return said.read_text(encoding="utf-8").strip() if said.exists() else None


def _output(words: list[str]) -> str | None:
    """What a command prints; None where there is no such command, or it fails."""
    with contextlib.suppress(OSError):
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return done.stdout.strip()
    return None
