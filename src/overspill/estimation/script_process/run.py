"""Run a script in a separate process, which serves it alone, and report."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

import torch

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.iterations import Enough, Iterations
from overspill.capture.virtual_gpu.record import unsupported
from overspill.capture.virtual_gpu.repeats import Repeats
from overspill.capture.virtual_gpu.script_patches import script_patches
from overspill.capture.virtual_gpu.values.invented import WHOLE, Invented, Place
from overspill.core.errors import OverspillError, RequestError, UnsupportedError, is_out_of_memory
from overspill.core.units import format_bytes
from overspill.estimation.script import ScriptRun
from overspill.pytorch.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)
from overspill.pytorch.patching import patched

from .confine import confine, is_refusal
from .places import lines_from, place_in, place_of, spelled, whereabouts
from .request import Mailbox, Request

_NO_ANSWER = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_MISSING = (
    "not compiled with CUDA",
    "no CUDA-capable device",
    "has no attribute '_cuda",
    "has no attribute '_nccl",
    "dummy base class",
)

TIME_IS_UP = signal.SIGXCPU
"""The signal sent to a script's process at the end of its time."""
_MOST_LINES = 6  # of the script that a note names
_TO_WIND_UP = 5.0  # seconds that a script has for its `finally` once it has shown enough


def run_script(request: Request, scratch: Path, mailbox: Mailbox) -> NoReturn:
    """Run the script, leave the answer in `mailbox`, and exit.

    The answer is a ScriptRun or an exception. `scratch` is an empty directory for this run, which receives its changes
    to files. The answer is left as soon as the recording suffices. Later work of the script, and how it ends, do not
    matter.
    """
    answer = _Answer(request, mailbox)
    try:
        program = _program(request.script, request.arguments)
        answer.way = confine(scratch, request.ways) if request.ways else ""
        # From here on the script's device is the virtual GPU.
        gpu = VirtualGpu(
            capability=request.capability, memory_bytes=request.memory_bytes, invented=answer.invented,
            saves=answer.way == "overlay",
        )  # fmt: skip
        progress = Iterations(gpu.recorder, request.iterations, answer.is_complete)
        answer.watch(progress, repeats := Repeats(gpu.recorder, whole_steps=request.whole_steps))
        with gpu, script_patches(), progress.watching(), repeats.cutting(), patched([(os, "_exit", answer.on_exit)]):
            _run(program, answer)
            if answer.is_mine:
                answer.script_ended()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the one who asked is told
        if os.environ.get("OVERSPILL_DEBUG") or not answer.is_mine:
            traceback.print_exception(error)
        answer.give(error)
        answer.leave(1)
    answer.leave(0)


class _Answer:
    """The one answer of this process about the script.

    Copies of the process that the script makes give none.
    """

    def __init__(self, request: Request, mailbox: Mailbox) -> None:
        self.way = ""  # how writes are kept from the disk
        self._request, self._mailbox = request, mailbox
        self._process, self._exit = os.getpid(), os._exit
        self._given = False
        self._ended_by = "the script ended"
        self._progress: Iterations | None = None
        self._more_notes: Callable[[], Iterator[str]] = lambda: iter(())
        self.invented = Invented()

    @property
    def is_mine(self) -> bool:
        """Whether this process is the original one, not a copy."""
        return os.getpid() == self._process

    def give(self, value: Any) -> None:
        """Leave `value`, if nothing has been left."""
        if self.is_mine and not self._given:
            self._given = True
            self._mailbox.put(value)

    def leave(self, code: int) -> NoReturn:
        """End the process now, without waiting for its threads."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed, or full: nobody is there to be told
                stream.flush()
        self._exit(code)

    def leave_later(self, error: OverspillError | None = None) -> None:
        """End the process if the script does not end in a few seconds.

        Then `error` is the answer, unless one exists.
        """

        def leave() -> None:
            self.give(error)
            self.leave(0)

        timer = threading.Timer(_TO_WIND_UP, leave)
        timer.daemon = True
        timer.start()

    def watch(self, progress: Iterations, repeats: Repeats) -> None:
        """Answer for `progress` from here on, also at a timeout.

        Code that was left out and placeholder values are noted.
        """
        self._progress = progress
        self._more_notes = lambda: _more_notes(repeats, self.invented)
        signal.signal(TIME_IS_UP, self._time_is_over)

    def is_complete(self) -> None:
        """Answer, once enough is recorded or the script has ended. A script that continues nevertheless is ended."""
        progress = self._progress
        assert progress is not None
        if not self.is_mine:
            raise Enough
        if self._given:
            self.leave(0)
        assert progress.recording is not None
        notes = (*_notes(progress, self._request, self._ended_by), *self._more_notes())
        found = ScriptRun(
            self._request.script, progress.recording, progress.iterations, progress.trains, progress.steps,
            progress.calls, tuple(progress.optimizers), progress.finished, notes,
        )  # fmt: skip
        self.give(found)
        self.leave_later()

    def script_ended(self) -> None:
        """Answer for a script that has ended, with or without an error.

        The answer is its recording, if it has one.
        """
        assert self._progress is not None
        self._progress.finish()
        if self._progress.recording is None:
            self.give(_never(self._request.script, self._progress))

    def on_exit(self, code: int) -> NoReturn:
        """Replace `os._exit` in the script, and in the processes that it makes."""
        if self.is_mine:
            assert self._progress is not None
            if code == 0 or self._progress.recording is not None:
                self.script_ended()
            else:
                place = place_in(sys._getframe(1)) or self._request.script
                self.give(RequestError(f"{place} exited with code {code}, before it had trained on cuda"))
        self._exit(code)

    def _time_is_over(self, _number: int, frame: FrameType | None) -> NoReturn:
        assert self._progress is not None
        seconds = f"{self._request.time_limit:g} seconds (--time-limit)"
        self._ended_by = f"the script was ended after {seconds},"
        self._progress.finish(cut_short=True)
        place = whereabouts(list(lines_from(frame)), self._request.script)
        self.give(RequestError(f"{place} was still running after {seconds}, before the script had trained on cuda"))
        self.leave(0)


# --- Running it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """A program to run as `__main__`: a file or a module."""

    name: str
    arguments: tuple[str, ...]
    file: Path | None
    """The file; None for a module, which is then `name`."""

    def run(self) -> None:
        """Run the program to its end, or until it raises. `sys` is changed as at Python's own start."""
        sys.argv[:] = [self.name, *self.arguments]
        sys.path.insert(0, str(Path.cwd() if self.file is None else self.file.resolve().parent))
        if self.file is None:
            if not _is_module(self.name):
                raise RequestError(
                    f"there is no script {self.name}, nor a module of that name; name a file, or a module as `python "
                    "-m` does"
                )
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
            return
        main = ModuleType("__main__")
        main.__file__ = str(self.file.absolute())
        main.__dict__["__builtins__"] = __builtins__
        sys.modules["__main__"] = main
        exec(compile(self.file.read_bytes(), main.__file__, "exec", dont_inherit=True), main.__dict__)  # noqa: S102


def _program(script: str | Path, arguments: Sequence[str]) -> _Program:
    path, name = Path(script), str(script)
    if path.is_dir() and (path / "__main__.py").is_file():
        path /= "__main__.py"
    if path.is_dir():
        raise RequestError(f"{name} is a directory, without a __main__.py to run; name the script in it")
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise RequestError(f"cannot read {name}: permission denied; name a file that may be read")
        if path.suffix == ".ipynb":
            raise RequestError(f"{name} is a notebook, not a script; `jupyter nbconvert --to script` makes one of it")
        return _Program(name, tuple(arguments), path)
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise RequestError(f"there is no script {name}; name a file that is there")
    return _Program(name, tuple(arguments), None)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _run(program: _Program, answer: _Answer) -> None:
    """Run `program` until it ends or has shown enough, and answer with its error if it fails."""
    in_threads: list[OverspillError] = []
    try:
        with _errors_of_threads(in_threads, answer):
            program.run()
    except Enough:
        pass
    except KeyboardInterrupt:
        raise
    except SystemExit as end:
        if not answer.is_mine:
            answer.leave(end.code if isinstance(end.code, int) else int(bool(end.code)))
        # The script's own exit is an answer only if it failed.
        if end.code not in {None, 0}:
            answer.give(_exited(program.name, end))
    except BaseException as error:
        if not answer.is_mine:
            raise
        answer.give(in_threads[0] if in_threads else _explained(program.name, error, answer))


@contextmanager
def _errors_of_threads(found: list[OverspillError], answer: _Answer) -> Iterator[None]:
    """Collect Overspill's errors that end threads of the script.

    They explain later failures of code that waits for these threads.
    """
    hook = threading.excepthook

    def notice(event: threading.ExceptHookArgs) -> None:
        if isinstance(event.exc_value, OverspillError):
            found.append(event.exc_value)
            answer.leave_later(event.exc_value)
        else:
            hook(event)

    threading.excepthook = notice
    try:
        yield
    finally:
        threading.excepthook = hook


# --- What to say of it ------------------------------------------------------------------------------------------------


def _notes(progress: Iterations, request: Request, ended_by: str) -> Iterator[str]:
    wanted = request.iterations
    if progress.iterations < wanted:
        yield f"{ended_by} after {progress.iterations} of {wanted} iterations"
    if progress.abandoned:
        yield (
            f"{', '.join(progress.abandoned)} took no step while {', '.join(progress.optimizers)} took many: "
            "what its steps take is not in the estimate"
        )
    if "overspill.runtime.compiled.compile" in sys.modules:
        yield "overspill.compile does nothing here: these are the figures of plain PyTorch"
    # What makes the estimate less certain.
    if not progress.trains and progress.iterations > wanted:
        yield f"memory grew from one forward pass to the next; {progress.iterations} were recorded"
    if "LBFGS" in progress.optimizers:
        yield "LBFGS keeps history_size directions; the estimate has those of the recorded steps"
    if torch.backends.cudnn.benchmark:
        yield (
            "torch.backends.cudnn.benchmark is on: while cuDNN tries engines, in the first iteration, it takes the "
            "largest workspace that fits into free memory, which stays reserved and is not in the estimate"
        )


def _more_notes(repeats: Repeats, invented: Invented) -> Iterator[str]:
    """Yield notes on code that was not run, and on placeholder values."""
    if repeats.skipped:
        yield f"what repeated itself was cut short: {repeats.skipped} calls of models were not run again"
    for (place, op), _ in zip(invented.shapes, range(_MOST_LINES), strict=False):
        yield f"{_lines([place])} runs {op}, whose shape depends on values: the largest that it can be was taken"
    if invented.sizes:
        yield (
            f"{_lines(invented.sizes)} counted or indexed by an invented {WHOLE}: if memory depends on it, the "
            "estimate "
            "may be too low"
        )
    if invented.lines:
        yield f"values were invented where the script decided by them or took them out: {_lines(invented.lines)}"


def _lines(places: Iterable[Place]) -> str:
    """Return the lines as `file:line`, the first few of them."""
    shown = [spelled(*place) for place in places]
    more = len(shown) - _MOST_LINES
    return ", ".join(shown[:_MOST_LINES]) + (f" and {more} more" if more > 0 else "")


def _never(name: str, progress: Iterations) -> RequestError:
    """Return the error for a script that ended without an iteration on the device."""
    if peak_bytes := progress.peak_bytes:
        return RequestError(
            f"{name} ended without a training step or a forward pass on cuda (it had {format_bytes(peak_bytes)} there)"
        )
    advice = (
        "choose the GPU, with the script's own option after --, or let it take one that is there: "
        '.to("cuda" if torch.cuda.is_available() else "cpu")'
    )
    if progress.host_steps:
        return RequestError(f"{name} trains on the CPU, not on cuda; {advice}")
    if progress.host_calls:
        return RequestError(f"{name} runs its model on the CPU, not on cuda; {advice}")
    return RequestError(
        f"{name} ended without training or running a model, and without using cuda; let it train, as with the "
        "arguments after --"
    )


def _exited(name: str, end: SystemExit) -> OverspillError:
    """Return the error for a script that exited with a failure, of its own or because of one of Overspill's errors."""
    ours = _ours_in(end)
    if ours is not None:
        return ours
    said = f"code {end.code}" if isinstance(end.code, int) else f"the message: {_one_line(end.code)}"
    return RequestError(f"{place_of(end) or name} exited with {said}, before it had trained on cuda")


def _explained(name: str, error: BaseException, answer: _Answer) -> BaseException:
    """Return the error for the user of an exception that the script raised."""
    ours = _ours_in(error)
    if ours is not None:
        return ours
    if is_out_of_memory(error):
        return error
    text = _one_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        return RequestError(f"{spelled(error.filename, error.lineno)} is no valid Python: {error.msg}")
    # The script's own line, and what an estimate does not allow or have there.
    place = place_of(error) or name
    if is_refusal(error, answer.way):
        return UnsupportedError(
            f"{place} would change files ({text}), which an estimate cannot keep apart from the real ones here; "
            "--allow-writes lets it"
        )
    if any(sign in str(error) for sign in _MISSING):
        return UnsupportedError(f"{place} uses a part of CUDA that an estimate does not have ({text})")
    given = answer.invented.places
    because = f"; values that an estimate does not compute were invented at {_lines(given)}" if given else ""
    return RequestError(f"{place} raised {type(error).__name__}{': ' if text else ''}{text}{because}")


def _ours_in(error: BaseException) -> OverspillError | None:
    """Return the error of Overspill that `error` is or came from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OverspillError):
            return seen
        if isinstance(seen, _NO_ANSWER):
            return unsupported(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
