"""Find the user's Python lines that an op comes from.

The user's lines are those of his program and of the packages that it uses. Left out are frames of torch, of Overspill
(except its networks), of Python's standard library, and everything outside of the captured program.

Relies on a module's hooks and forward being called from the file of `nn.Module`.
"""

from __future__ import annotations

import os
import site
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import nn

from overspill.core import Frame
from overspill.core.frames import FrameTable, in_package
from overspill.pytorch.autograd import engine_run_backward

TORCH = tuple(str(Path(torch.__file__).parents[1] / name) + os.sep for name in ("torch", "functorch"))
STANDARD = sysconfig.get_path("stdlib") + os.sep
OURS = str(Path(__file__).parents[1]) + os.sep
_NETWORKS = f"{OURS}models{os.sep}"
_NO_NETWORKS = frozenset(
    {
        "__init__.py",
        "configured.py",
        "hugging_face.py",
        "inputs.py",
        "job.py",
        "optimizers.py",
        "registry.py",
        "step.py",
        "user.py",
    }
)
_OUTERMOST = tuple(
    OURS + name.replace("/", os.sep)
    for name in (
        "capture/virtual_gpu/record.py",
        "capture/compiled/step_joint.py",
        "runtime/step/programs.py",
        "estimation/script_process/run.py",
    )
)
"""Overspill's files that call the user's program; frames outside of them are not part of it."""
ENGINE = engine_run_backward.__code__
"""The code that calls autograd's engine from Python."""
_CALLS_MODULES = nn.Module.__call__.__code__.co_filename
_MOST_UPWARDS = 2
"""The most parent folders in a path relative to the working directory; beyond, the absolute path is as short."""
Stack = tuple[tuple[str, int, str], ...]
"""File, line and function of each frame, outermost first."""
NOBODYS = -2
"""In place of a line number: autograd's engine runs, without a line of Python in it."""
_LEFT_OUT, _USERS, _OUTSIDE, _AUTOGRAD, _MODULE = range(5)
"""Kinds of a frame's file."""


class _Files(dict[str, int]):
    """Kind of each file, cached."""

    def __missing__(self, file: str) -> int:
        self[file] = found = _what(file)
        return found


_FILES = _Files()


class FrameNumbers:
    """Numbers the user's lines, one number for each stack that leads to a line."""

    def __init__(self) -> None:
        self._table = FrameTable()
        self._of_stack: dict[tuple[int, ...], int] = {}
        self._of_lines: dict[Stack, int] = {}
        self._of_backward = {-1: -1}
        self._codes: dict[int, CodeType] = {}  # keeps code objects alive, so that their ids stay unique
        self._shown: dict[str, str] = {}
        self._modules: list[tuple[int, int]] = [(0, -1)]

    def found(self) -> tuple[Frame, ...]:
        """Return all frames, by number."""
        return self._table.found()

    def enter(self, frame: FrameType | None) -> None:
        """Note that a module's forward begins; `frame` is in its hook.

        Until `leave`, stacks end at that call.
        """
        while frame is not None and _FILES[frame.f_code.co_filename] != _MODULE:
            frame = frame.f_back
        if frame is None:
            self._modules.append(self._modules[-1])
        else:  # only its id: a frame that is held would hold its tensors
            self._modules.append((id(frame), self.running(frame)))

    def leave(self) -> None:
        """Note that the forward of the module entered last ends."""
        if len(self._modules) > 1:
            self._modules.pop()

    def running(self, frame: FrameType | None, *, in_backward: bool = False) -> int:
        """Return the number of the innermost running line, from `frame` outwards; -1 for none.

        If `in_backward`, returns NOBODYS where autograd's engine is reached before any line.
        """
        stack: list[int] = []
        # Collect the user's frames outwards, up to the module's call, the engine or the edge of the program.
        files, start, (module, caller) = _FILES, frame, self._modules[-1]
        while frame is not None:
            code = frame.f_code
            what = files[code.co_filename]
            if what:
                if what == _USERS:
                    stack += (id(code), frame.f_lasti)
                elif what == _MODULE:
                    if id(frame) == module:
                        stack.append(caller)
                        break
                elif what == _OUTSIDE:
                    break
                elif in_backward and code is ENGINE and not stack:
                    return NOBODYS
            frame = frame.f_back
        # Equal stacks are looked up by code and instruction, without reading line numbers.
        key = tuple(stack)
        found = self._of_stack.get(key)
        if found is None:
            found = self._of_stack[key] = self._new(start, frame, caller if len(stack) % 2 else -1)
        return found

    def of_stack(self, stack: Stack) -> int:
        """Return the number of the innermost line of a recorded stack; -1 for none."""
        found = self._of_lines.get(stack)
        if found is None:
            found = -1
            for file, line, function in stack:
                if _FILES[file] == _USERS:
                    found = self._number(file, line, function, found)
            self._of_lines[stack] = found
        return found

    def backward_of(self, number: int) -> int:
        """Return the number for the backward of a line; -1 for none."""
        found = self._of_backward.get(number)
        if found is None:
            found = self._table.number(replace(self._table[number], backward=True))
            self._of_backward[number] = found
        return found

    def _new(self, frame: FrameType | None, end: FrameType | None, number: int) -> int:
        """Return the number of the innermost line from `frame` to before `end`; line `number` called the outermost."""
        users: list[FrameType] = []
        while frame is not None and frame is not end:
            if _FILES[frame.f_code.co_filename] == _USERS:
                users.append(frame)
            frame = frame.f_back
        for caller in reversed(users):
            code = caller.f_code
            self._codes[id(code)] = code
            number = self._number(code.co_filename, caller.f_lineno or code.co_firstlineno, code.co_name, number)
        return number

    def _number(self, file: str, line: int, function: str, caller: int) -> int:
        if file not in self._shown:
            self._shown[file] = shown_path(file)
        return self._table.number(Frame(self._shown[file], line, function, caller))


def stack_within(frame: FrameType | None) -> Stack:
    """Return the user's running lines, from `frame` to the program's edge or autograd's engine."""
    found = []
    while frame is not None and frame.f_code is not ENGINE and (what := _FILES[frame.f_code.co_filename]) != _OUTSIDE:
        if what == _USERS:
            found.append(
                (frame.f_code.co_filename, frame.f_lineno or frame.f_code.co_firstlineno, frame.f_code.co_name)
            )
        frame = frame.f_back
    return tuple(reversed(found))


def _what(file: str) -> int:
    """Return the kind of `file`."""
    if file == ENGINE.co_filename:
        return _AUTOGRAD
    if file == _CALLS_MODULES:
        return _MODULE
    if file in _OUTERMOST:
        return _OUTSIDE
    if file.startswith(OURS):
        network = file.startswith(_NETWORKS) and file.removeprefix(_NETWORKS) not in _NO_NETWORKS
        return _USERS if network else _LEFT_OUT
    if file.startswith(TORCH) or (file.startswith("<") and not file.startswith(("<stdin>", "<ipython"))):
        return _LEFT_OUT
    return _LEFT_OUT if file.startswith(STANDARD) and not in_package(file) else _USERS


def is_of_the_script(file: str) -> bool:
    """Return whether `file` is the user's own: not torch's, Overspill's, Python's library or a package."""
    return not in_package(file) and not file.startswith((*TORCH, OURS, STANDARD, "<"))


def shown_path(file: str) -> str:
    """Return the path in short: within its package, or from the working directory."""
    if not file.startswith(os.sep) and not Path(file).is_absolute():
        return file
    if file.startswith(OURS):
        return str(Path(file).relative_to(Path(OURS).parent))
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        if file.startswith(folder + os.sep):
            return file.removeprefix(folder + os.sep)
    try:
        near = os.path.relpath(file)
    except (OSError, ValueError):  # no working directory any more, or another drive
        return file
    upwards = sum(part == os.pardir for part in Path(near).parts)
    return file if upwards > _MOST_UPWARDS else near
