"""Find the line of a program that reads a value, among frames of torch and Overspill."""

from __future__ import annotations

import linecache
from collections.abc import Mapping
from types import FrameType

from overspill.capture.frames import OURS, STANDARD, TORCH
from overspill.core.frames import in_package


def caller(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside Overspill, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame = frame.f_back
    return frame


def user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame outside torch and Overspill, from `frame` outwards."""
    while frame is not None and frame.f_code.co_filename.startswith((*TORCH, OURS, "<")):
        frame = frame.f_back
    return frame


def noted_frame(frame: FrameType | None) -> FrameType | None:
    """Return the same as `user_frame`, but outside Python's standard library too."""
    frame = user_frame(frame)
    while frame is not None and frame.f_code.co_filename.startswith(STANDARD):
        if in_package(frame.f_code.co_filename):
            break
        frame = user_frame(frame.f_back)
    return frame


def user_line(frame: FrameType | None, lines: Mapping[FrameType, int] | None = None) -> str:
    """Return `file:line, in function: source` of the innermost frame outside torch and Overspill.

    `lines` are line numbers of frames that have gone on since.
    """
    frame = user_frame(frame)
    if frame is None:
        return "the program"
    file, line = frame.f_code.co_filename, (lines or {}).get(frame, frame.f_lineno)
    linecache.checkcache(file)
    return f"{file}:{line}, in {frame.f_code.co_name}: `{linecache.getline(file, line).strip()}`"
