"""Which line of a program it is that asks, among the frames of torch and Overspill."""

from __future__ import annotations

import linecache
import os
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

import torch

_TORCH = str(Path(torch.__file__).parent) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_OURS = str(Path(__file__).parents[3]) + os.sep


def caller(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside Overspill, from `frame` on outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame outside torch and Overspill, from `frame` on outwards."""
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        frame = frame.f_back
    return frame


def noted_frame(frame: FrameType | None) -> FrameType | None:
    """As `user_frame`, but not one of Python's own library either."""
    frame = user_frame(frame)
    while frame is not None and frame.f_code.co_filename.startswith(_STANDARD):
        if "site-packages" in frame.f_code.co_filename:
            break
        frame = user_frame(frame.f_back)
    return frame


def user_line(frame: FrameType | None, lines: Mapping[FrameType, int] | None = None) -> str:
    """`file:line, in function: source` of the innermost frame outside torch and Overspill.

    `lines` are those at which frames were, for frames that have gone on since.
    """
    frame = user_frame(frame)
    if frame is None:
        return "the program"
    file, line = frame.f_code.co_filename, (lines or {}).get(frame, frame.f_lineno)
    linecache.checkcache(file)
    return f"{file}:{line}, in {frame.f_code.co_name}: `{linecache.getline(file, line).strip()}`"
