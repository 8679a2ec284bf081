"""Runs an ordinary PyTorch program on a GPU that is not there and returns what it did to device memory."""

from __future__ import annotations

from collections.abc import Callable

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from overspill.core.errors import OverspillError, UnsupportedError

from .recorder import Recorder
from .recording import Recording
from .virtual_gpu import VirtualGpu, user_line


def record(program: Callable[[Recorder], None], *, capability: tuple[int, int] = (8, 0)) -> Recording:
    """The recording of `program`, which runs on `cuda` and tells the recorder where its iterations start.

    Nothing is computed. Raises UnsupportedError, naming the line, where the program cannot go on without values.
    """
    with VirtualGpu(capability=capability) as gpu:
        try:
            program(gpu.recorder)
        except OverspillError:
            raise
        except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException) as error:
            raise _unsupported(error) from error
        return gpu.recorder.recording()


def _unsupported(error: BaseException) -> UnsupportedError:
    """What to tell of an op that has no answer without values."""
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    where = user_line(frames[-1]) if frames else "the program"
    op = getattr(error, "func", error)
    return UnsupportedError(f"{where} runs `{op}`, whose result depends on values that an estimate does not compute")
