"""A training script as its user has it, run for a few iterations on a GPU that is not there."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.iterations import Enough, Iterations
from overspill.capture.virtual_gpu.process_state import kept_process
from overspill.capture.virtual_gpu.record import unsupported
from overspill.capture.virtual_gpu.script_patches import script_patches
from overspill.core.errors import OverspillError, RequestError, UnsupportedError, is_out_of_memory
from overspill.core.units import format_bytes

from .programs import ITERATIONS

_NO_ANSWER = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (_OURS, "<", *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")))
_MISSING = ("not compiled with CUDA", "no CUDA-capable device", "has no attribute '_cuda", "has no attribute '_nccl")


@dataclass(frozen=True)
class ScriptRun:
    """What a script did to device memory in its first `iterations`, rounds of all its optimizers.

    `trains` is false where it only ran models; an iteration is then a call of one. `steps` counts the steps of the
    `optimizers` (names of classes), `calls` those of models on the device. `finished` says that the script ended by
    itself. `notes` are for the user: what the recording does not have.
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
) -> ScriptRun:
    """The recording of `script`, run as `python script arguments…` would, on a virtual GPU of `memory_bytes`.

    `script` is a file, or a module's dotted name as `python -m` takes it. It is ended after that many iterations, and
    the process is left as it was. With `output_to_stderr`, what it prints goes to standard error. Only modules of
    libraries that it imported stay; those were set up where there is a GPU.

    Raises RequestError for what is wrong with the script or raised by it, and where it does not use `cuda`;
    UnsupportedError, naming the line, where it cannot go on without computed values.
    """
    if iterations < 1:
        raise RequestError(f"iterations {iterations} is not a positive number")
    program = _program(script, arguments)
    with kept_process(program.folder), _stdout_on_stderr() if output_to_stderr else nullcontext():
        gpu = VirtualGpu(capability=capability, memory_bytes=memory_bytes)
        progress = Iterations(gpu.recorder, iterations)
        with gpu, script_patches(), progress.watching():
            _run(program, progress)
            finished = progress.recording is None
            progress.finish()
            notes = tuple(_notes(progress, iterations))
    if progress.recording is None:
        raise _never(program.name, progress, gpu.recorder.peak_bytes)
    return ScriptRun(
        program.name, progress.recording, progress.iterations, progress.trains, progress.steps, progress.calls,
        tuple(progress.optimizers), finished, notes,
    )  # fmt: skip


# --- Running it -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """What to run as `__main__`: a file, or else the module `name`."""

    name: str
    arguments: tuple[str, ...]
    file: Path | None

    @property
    def folder(self) -> Path:
        """Where Python looks first for what the program imports."""
        return Path.cwd() if self.file is None else self.file.resolve().parent

    def run(self) -> None:
        """Run it to its end, or until something is raised. `sys` is changed as Python's own start would."""
        sys.argv[:] = [self.name, *self.arguments]
        sys.path.insert(0, str(self.folder))
        if self.file is None:
            if not _is_module(self.name):
                raise RequestError(f"there is no script {self.name}, nor a module of that name")
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
        raise RequestError(f"{name} is a directory, without a __main__.py to run")
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise RequestError(f"cannot read {name}: permission denied")
        return _Program(name, tuple(arguments), path)
    if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
        raise RequestError(f"there is no script {name}")
    return _Program(name, tuple(arguments), None)


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _run(program: _Program, progress: Iterations) -> None:
    """Run `program` until it ends or has shown enough; raises what `record_script` raises for its errors."""
    in_threads: list[OverspillError] = []
    try:
        with _errors_of_threads(in_threads):
            program.run()
    except (Enough, KeyboardInterrupt) as end:
        if isinstance(end, KeyboardInterrupt):
            raise
    except SystemExit as end:
        if progress.recording is None and end.code not in {None, 0}:
            raise _exited(program.name, end) from end
    except BaseException as error:
        if progress.recording is None:
            raise (in_threads[0] if in_threads else _explained(program.name, error)) from error


@contextmanager
def _errors_of_threads(found: list[OverspillError]) -> Iterator[None]:
    """Errors of ours that end a thread of the script are found, and explain what fails after."""
    hook = threading.excepthook

    def notice(event: threading.ExceptHookArgs) -> None:
        if isinstance(event.exc_value, OverspillError):
            found.append(event.exc_value)
        else:
            hook(event)

    threading.excepthook = notice
    try:
        yield
    finally:
        threading.excepthook = hook


@contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Standard output, also that of child processes and of C code, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


# --- What to say of it ------------------------------------------------------------------------------------------------


def _notes(progress: Iterations, wanted: int) -> Iterator[str]:
    if progress.iterations < wanted:
        yield f"the script ended after {progress.iterations} of {wanted} iterations"
    if progress.abandoned:
        yield (
            f"{', '.join(progress.abandoned)} took no step while {', '.join(progress.optimizers)} took many: "
            "what its steps take is not in the estimate"
        )
    if not progress.trains and progress.iterations > wanted:
        yield f"memory grew from one forward pass to the next; {progress.iterations} were recorded"
    if "LBFGS" in progress.optimizers:
        yield "LBFGS keeps history_size directions; the estimate has those of the recorded steps"
    if torch.backends.cudnn.benchmark:
        yield (
            "torch.backends.cudnn.benchmark is on: while cuDNN tries engines, in the first iteration, it takes the "
            "largest workspace that fits into free memory, which stays reserved and is not in the estimate"
        )


def _never(name: str, progress: Iterations, peak_bytes: int) -> RequestError:
    """The error for a script that ended without an iteration on the device."""
    if peak_bytes:
        return RequestError(
            f"{name} ended without a training step or a forward pass on cuda (it had {format_bytes(peak_bytes)} there)"
        )
    advice = "choose the GPU, with the script's own option after -- if it has one"
    if progress.host_steps:
        return RequestError(f"{name} trains on the CPU, not on cuda; {advice}")
    if progress.host_calls:
        return RequestError(f"{name} runs its model on the CPU, not on cuda; {advice}")
    return RequestError(f"{name} ended without training or running a model, and without using cuda")


def _exited(name: str, end: SystemExit) -> OverspillError:
    """The error for a script that gave up, by its own words or for a reason that is ours."""
    ours = _ours_in(end)
    if ours is not None:
        return ours
    said = f"code {end.code}" if isinstance(end.code, int) else f"the message: {_one_line(end.code)}"
    return RequestError(f"{_place(end) or name} exited with {said}, before it had trained on cuda")


def _explained(name: str, error: BaseException) -> BaseException:
    """What to tell of an exception that the script did not catch."""
    ours = _ours_in(error)
    if ours is not None:
        return ours
    if is_out_of_memory(error):
        return error
    text = _one_line(error)
    if isinstance(error, SyntaxError) and error.filename:
        return RequestError(f"{_shown(error.filename)}:{error.lineno} is no valid Python: {error.msg}")
    place = _place(error) or name
    if any(sign in str(error) for sign in _MISSING):
        return UnsupportedError(f"{place} uses a part of CUDA that an estimate does not have ({text})")
    return RequestError(f"{place} raised {type(error).__name__}{': ' if text else ''}{text}")


def _ours_in(error: BaseException) -> OverspillError | None:
    """The error of ours that `error` is or came from."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OverspillError):
            return seen
        if isinstance(seen, _NO_ANSWER):
            return unsupported(seen)
        seen = seen.__cause__ or seen.__context__
    return None


def _place(error: BaseException) -> str:
    """`file:line` of the innermost frame of `error` in code that is not a library's; empty if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    found = next((frame for frame in reversed(frames) if not frame.filename.startswith(_LIBRARIES)), None)
    return "" if found is None else f"{_shown(found.filename)}:{found.lineno}"


def _shown(file: str) -> str:
    """The path of `file` as seen from the current directory, where it lies below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
