"""Runs an ordinary PyTorch program on a GPU that is not there and returns what it did to device memory."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.core.errors import OverspillError, RequestError, UnsupportedError, is_out_of_memory

from .gpu import VirtualGpu
from .values.frames import user_line


def record(
    program: Callable[[Recorder], None], *, capability: tuple[int, int] = (8, 0), lines: bool = True
) -> Recording:
    """The recording of `program`, which runs on `cuda` and tells the recorder where its iterations start.

    Nothing is computed. `lines`: whether it has the lines of Python that ran each op. Raises UnsupportedError, naming the line, where the program cannot go on without values, and
    RequestError where it fails by itself.
    """
    with VirtualGpu(capability=capability, lines=lines) as gpu:
        try:
            program(gpu.recorder)
        except OverspillError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise unsupported(error) from error
        except NotImplementedError as error:
            raise UnsupportedError(_told(error)) from error
        except Exception as error:  # whatever the user's code raises is theirs to read in one line
            if is_out_of_memory(error):
                raise
            raise _failed(error) from error
        return gpu.recorder.recording()


def unsupported(error: BaseException) -> UnsupportedError:
    """What to tell of an op that has no answer without values."""
    op = getattr(error, "func", error)
    if isinstance(error, UnsupportedOperatorException):
        return UnsupportedError(f"{_line_of(error)} runs `{op}`, for which torch tells no shapes without computing it")
    return UnsupportedError(
        f"{_line_of(error)} runs `{op}`, whose result depends on values that an estimate does not compute"
    )


def _failed(error: Exception) -> RequestError:
    """What to tell of a program that raised `error`."""
    return RequestError(_told(error))


def _told(error: Exception) -> str:
    return f"{_line_of(error)} raised {type(error).__name__}: {' '.join(str(error).split())}"


def _line_of(error: BaseException) -> str:
    """The user's line that `error` comes from."""
    lines = dict(walk_tb(error.__traceback__))
    return user_line(next(reversed(lines), None), lines)
