"""Run a PyTorch program on the virtual GPU and record its device memory."""

from __future__ import annotations

from collections.abc import Callable
from traceback import walk_tb

from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.core.errors import OverspillError, RequestError, UnsupportedError, is_out_of_memory
from overspill.core.user_code import model_raised
from overspill.pytorch.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from .gpu import VirtualGpu
from .values.frames import user_line


def record(
    program: Callable[[Recorder], None], *, capability: tuple[int, int] = (8, 0), lines: bool = True
) -> Recording:
    """Run `program` on a virtual `cuda`; return the recording.

    `program` is called with the recorder, and reports to it where iterations start. Nothing is computed. `lines`:
    whether ops have their lines of Python. Raises UnsupportedError, naming the line, if the program needs values to go
    on, and RequestError if it fails by itself.
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
            raise RequestError(model_raised(error)) from error
        return gpu.recorder.recording()


def unsupported(error: BaseException) -> UnsupportedError:
    """Return the error for an op that has no result without values."""
    op = getattr(error, "func", error)
    if isinstance(error, UnsupportedOperatorException):
        return UnsupportedError(f"{_line_of(error)} runs `{op}`, for which torch tells no shapes without computing it")
    return UnsupportedError(
        f"{_line_of(error)} runs `{op}`, whose result depends on values that an estimate does not compute; "
        "a script with its own data (--script) is estimated with the most that it can choose"
    )


def _told(error: Exception) -> str:
    return f"{_line_of(error)} raised {type(error).__name__}: {' '.join(str(error).split())}"


def _line_of(error: BaseException) -> str:
    """Return the user's line that raised `error`."""
    lines = dict(walk_tb(error.__traceback__))
    return user_line(next(reversed(lines), None), lines)
