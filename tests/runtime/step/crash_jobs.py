"""Small trainings that `crash.py` stops, in a process of their own: `python -m tests.runtime.step.crash_jobs KIND:MOST:JOB …`.

Prints a JSON object a line. What every training must come to is what plain PyTorch has after so many steps. The process
imports everything and has trained once before it forks, so that a child takes a fraction of a second.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from tests.runtime.step.crash import CALLS, KILL, Ended, Rule, run_watched
from tests.runtime.step.whole_steps import Mlp, batch_for, cross_entropy, made
from torch import Tensor

import overspill
from overspill.core.errors import OverspillError
from overspill.core.files import write_whole
from overspill.runtime.reachable import same_bits

BEFORE = 2
"""Steps before the one that is stopped: plans are made, and the store is full."""
State = dict[str, Tensor]
T = TypeVar("T")


class Training:
    """A model, its optimizer, and what takes a step with a number."""

    def __init__(self, rows: int = 8) -> None:
        self.model = made(Mlp)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        self.inputs = batch_for(self.model, rows)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.model, *self.inputs).backward()
        self.optimizer.step()

    def before(self) -> None:
        """Keep what there is, for a step that fails."""
        self.kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def again(self) -> None:
        """Take the step that an error has stopped: from what there was, for forward changes buffers as it goes."""
        self.load(*self.kept)
        self.step()

    def take(self, number: int, again: bool = False) -> None:
        torch.manual_seed(number)
        (self.again if again else self.step)()

    def state(self) -> State:
        """Weights, buffers, and the optimizer's state, all by name."""
        found = {f"model.{n}": t for n, t in self.model.state_dict().items()}
        for number, of in self.optimizer.state_dict()["state"].items():
            found |= {f"state.{number}.{key}": value for key, value in of.items()}
        return found

    def load(self, model: Any, optimizer: Any) -> None:
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)

    def close(self) -> None:
        """Give back what it holds."""


class WholeStep(Training):
    """By `train_step`, with what moves in `store`."""

    def __init__(self, store: str, folder: Path, rows: int = 8) -> None:
        super().__init__(rows)
        directory = {"store_dir": folder} if store == "disk" else {}
        self.planned = overspill.train_step(
            self.model, cross_entropy, self.optimizer, budget="smallest", policy="window", store=store, **directory
        )

    def step(self) -> None:
        self.planned(*self.inputs)

    def before(self) -> None:
        """Nothing is kept."""

    def again(self) -> None:
        if self.planned.is_unfinished:
            self.planned.resume()
        else:
            self.step()

    def close(self) -> None:
        self.planned.close(bring_back=False)


class CompiledModel(Training):
    """By `overspill.compile`, with all that can move on disk."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.compiled = overspill.compile(self.model, budget="1GiB", policy="vdnn-all", store="disk", store_dir=folder)

    def step(self) -> None:
        self.optimizer.zero_grad()
        cross_entropy(self.compiled, *self.inputs).backward()
        self.optimizer.step()


MANY = 4096
"""Rows of which the activations are blocks that the C library maps one by one."""
JOBS: dict[str, Callable[[Path], Training]] = {
    "train_step, disk": lambda folder: WholeStep("disk", folder),
    "train_step, host": lambda folder: WholeStep("host", folder),
    "train_step, many rows": lambda folder: WholeStep("disk", folder, MANY),
    "compile, disk": CompiledModel,
}


def plain_states(job: str, steps: int = BEFORE + 3) -> list[State]:
    """The state after none, one, … steps of plain PyTorch."""
    training, states = Training(MANY if "many" in job else 8), []
    for number in range(1, steps + 1):
        states.append(copy.deepcopy(training.state()))
        training.take(number)
    return [*states, copy.deepcopy(training.state())]


def differences(one: State, other: State) -> list[str]:
    return sorted(one.keys() ^ other.keys()) + [n for n in one if n in other and not same_bits(one[n], other[n])]


def save(folder: Path, number: int, training: Training) -> None:
    """A checkpoint at once, by our own way of writing files."""
    file = io.BytesIO()
    torch.save((number, training.model.state_dict(), training.optimizer.state_dict()), file)
    write_whole(folder / "checkpoint", file.getvalue())


class Killed:
    """Kills a training at one system call, and looks at what there is then."""

    def __init__(self, job: str, states: list[State]) -> None:
        self.job = job
        self.states = states
        self.rule = Rule()
        self._seen: dict[bytes, list[str]] = {}  # checkpoints, and what was wrong with them

    def calls(self, *, whole: bool) -> int:
        """How many system calls there are, of two steps and a checkpoint between, or of the `whole` life."""
        with tempfile.TemporaryDirectory() as folder:
            ended = self._run(Path(folder), 0, whole=whole)
            assert ended.code == 0, ended
            return self.rule.count

    def at(self, number: int, *, whole: bool) -> dict[str, Any]:
        """What is found after it was killed at call `number`."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            ended = self._run(folder, number, whole=whole)
            found = {
                "job": self.job,
                "at": number,
                "whole": whole,
                "code": ended.code,
                "hung": ended.hung,
                "said": ended.said,
            }
            found["left"] = sorted(path.name for path in folder.iterdir())
            found["wrong"] = self._look(folder)
            return found

    def _run(self, folder: Path, number: int, *, whole: bool) -> Ended:
        def child() -> None:
            if whole:
                self.rule.set(watches=True, at=number, error=KILL)
            training = JOBS[self.job](folder)
            for step in range(1, BEFORE + 1):
                training.take(step)
            save(folder, BEFORE, training)
            if not whole:
                self.rule.set(watches=True, at=number, error=KILL)
            training.take(BEFORE + 1)
            save(folder, BEFORE + 1, training)
            training.take(BEFORE + 2)
            self.rule.rest()

        self.rule.set()
        return run_watched(child, self.rule)

    def _look(self, folder: Path) -> list[str]:
        """What is not as it should be: the checkpoint is a whole one, and a new process goes on from it as plain PyTorch does."""
        if not (folder / "checkpoint").exists():
            return []
        content = (folder / "checkpoint").read_bytes()
        if content not in self._seen:
            self._seen[content] = self._trained_on(folder)
        return self._seen[content]

    def _trained_on(self, folder: Path) -> list[str]:
        number, model, optimizer = torch.load(folder / "checkpoint")

        def child() -> None:
            training = JOBS[self.job](folder)
            training.load(model, optimizer)
            if wrong := differences(self.states[number], training.state()):
                raise AssertionError(wrong)
            training.take(number + 1)
            if wrong := differences(self.states[number + 1], training.state()):
                raise AssertionError(wrong)

        ended = run_watched(child, Rule())
        return [] if ended.code == 0 else [ended.said]


ERRORS = [
    ("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("pwrite", errno.EINTR), ("pread", errno.EIO),
    ("pread", errno.EINTR), ("pread", errno.ENOMEM), ("mmap", errno.ENOMEM),
    ("fallocate", errno.ENOSPC), ("fallocate", errno.EIO), ("fallocate", errno.EINTR), ("openat", errno.ENOSPC),
    ("openat", errno.EMFILE), ("ftruncate", errno.EIO), ("fstatfs", errno.EIO), ("clone3", errno.EAGAIN),
    ("munmap", errno.ENOMEM), ("close", errno.EIO), ("mprotect", errno.ENOMEM), ("write", errno.EIO),
]  # fmt: skip
"""Calls, and what they fail with."""


QUICK = [("pread", errno.EIO), ("mmap", errno.ENOMEM)]
"""Those of them that do not wait for the long suite."""


@dataclass(frozen=True)
class Fault:
    """System calls called `name` fail, from number `at` on, `times` of them; in the `first` step, or in one that has its plan."""

    name: str
    error: int
    first: bool
    at: int = 0
    times: int = 1

    def arm(self, rule: Rule) -> None:
        rule.set(number=CALLS[self.name], at=self.at, times=self.times, error=self.error, watches=True)


def failing(
    job: str, states: list[State], most: int, errors: Sequence[tuple[str, int]] = ERRORS
) -> Iterator[dict[str, Any]]:
    """System calls that fail, `most` of each kind, some several times running."""
    rule = Rule()
    rng = random.Random(job)
    for name, error, first in ((*e, f) for e in errors for f in (True, False)):
        counted, _ = _run_with(Fault(name, error, first), job, states, rule)
        assert counted.code == 0, counted
        count = rule.count
        for at in sorted(rng.sample(range(1, count + 1), min(count, most))):
            fault = Fault(name, error, first, at, rng.choice((1, 1, 2, 5)))
            ended, left = _run_with(fault, job, states, rule)
            yield {"job": job, "call": name, **asdict(fault), **ended._asdict(), "left": left, "met": rule.met} | {
                "error": errno.errorcode[error]
            }


def _run_with(fault: Fault, job: str, states: list[State], rule: Rule) -> tuple[Ended, list[str]]:
    """How a training ends with `fault`, and what it leaves behind."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_watched(partial(_train, fault, JOBS[job], Path(folder), states, rule), rule)
        return ended, [path.name for path in Path(folder).iterdir()]


def _train(fault: Fault, make: Callable[[Path], Training], folder: Path, states: list[State], rule: Rule) -> None:
    """Train, with `fault` in one step; say what was raised, and raise where numbers are wrong."""
    if fault.first:
        fault.arm(rule)
    stopped: list[str] = []
    training = _insist(lambda _: make(folder), stopped)
    for number in range(1, BEFORE + 2):
        training.before()
        if number == BEFORE + 1 and not fault.first:
            fault.arm(rule)
        _insist(partial(training.take, number), stopped)
        if number == 1 and fault.first:
            rule.rest()
    rule.rest()
    sys.stderr.write("\n".join(stopped))
    if wrong := differences(states[BEFORE + 1], training.state()):
        raise AssertionError(wrong)


def _insist(call: Callable[[bool], T], stopped: list[str]) -> T:
    """What `call` gives in the end; it is told whether it is called again."""
    again = False
    while True:
        try:
            return call(again)
        except Exception as refusal:  # noqa: BLE001 - said to the parent
            _note(stopped, refusal)
            again = True


def _note(stopped: list[str], error: Exception) -> None:
    kind = "ours" if isinstance(error, OverspillError) else "other"
    stopped.append(f"{kind}: {type(error).__name__}: {error}")
    if len(stopped) > 20:
        raise AssertionError(stopped)


def spread(count: int, most: int) -> list[int]:
    """All numbers from 1 to `count`, or `most` of them, evenly."""
    return sorted(
        {1 + i * (count - 1) // max(most - 1, 1) for i in range(most)} if most < count else range(1, count + 1)
    )


def main() -> None:
    asked = [argument.split(":") for argument in sys.argv[1:]]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for _, _, job in asked:
            training = JOBS[job](Path(folder))
            training.take(1)
            training.close()
            del training
    torch._dynamo.reset()
    gc.collect()
    for kind, most, job in asked:
        for found in _found(kind, int(most), job, plain_states(job)):
            print(json.dumps(found), flush=True)  # noqa: T201


def _found(kind: str, most: int, job: str, states: list[State]) -> Iterator[dict[str, Any]]:
    if kind in ("errors", "quick errors"):
        yield from failing(job, states, most, QUICK if kind == "quick errors" else ERRORS)
        return
    killed = Killed(job, states)
    whole = kind == "kill in all"
    for number in spread(killed.calls(whole=whole), most):
        yield killed.at(number, whole=whole)


if __name__ == "__main__":
    main()
