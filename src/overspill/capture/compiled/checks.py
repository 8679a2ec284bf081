"""Keep checks of unknown values in the graph, such as `if not valid.all(): raise`.

`if not valid.all(): raise ValueError(…)` may read a value that depends on parameters, as for a distribution's
arguments. The step can continue with one answer only. So the graph of a whole step takes that branch, and contains the
check: an op that raises the error of the other branch.

Both branches are tried on fake tensors to see whether a read is such a check. If the step continues in both, it is not.
Inductor's kernels would end the process instead of raising. So a step for them returns the values to check, and the
check runs after its forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from overspill.capture.frames import Stack
from overspill.core.errors import OverspillError
from overspill.pytorch.dispatch import check_elements
from overspill.pytorch.fake_tensors import FakeTensor

from .effects import EFFECT
from .known_values import UnknownValue

Step = Callable[..., Any]
_READS = (Tensor.__bool__, torch.is_nonzero, Tensor.is_nonzero, Tensor.item)
_ASSERT = torch.ops.aten._assert_async.msg
_MARK = "overspill check "


class Check(NamedTuple):
    """One read of an unknown truth value with which the step can continue for one answer only."""

    passes: bool
    """The answer with which the step continues."""
    error: Exception
    """The error that the step raises for the other answer."""

    def check_value(self, value: Tensor) -> None:
        """Raise the error if `value` is the other answer."""
        if bool(value) != self.passes:
            raise self.error.with_traceback(None)


class Checks:
    """The checks of one step; `followed` runs the step with them.

    If `returned`, the step returns the values to check after its own results; otherwise it asserts them.
    """

    def __init__(self, *, returned: bool = False) -> None:
        self.made: list[Check] = []
        """The checks of the last run, in order."""
        self._values: list[Tensor] | None = [] if returned else None
        self._known: dict[Stack, Check] = {}
        self._tried: dict[Stack, bool] = {}

    def followed(self, step: Step, *values: Tensor) -> Any:
        """Run the step, answering each check so that it passes. Raises UnknownValue for any other read."""
        self.made.clear()
        if self._values is None:
            with _Reads(self._answer):
                return step(*values)
        self._values.clear()
        with _Reads(self._answer):
            results = step(*values)
        return *results, *self._values

    def decide(self, asked: UnknownValue, step: Step, values: Sequence[FakeTensor]) -> None:
        """Try both answers to find out whether a read is a check; raise the error `asked` if it is not."""
        # It was answered before and raised again, so it does not read a truth value.
        if asked.lines in self._known:
            raise asked
        # A check raises for exactly one of the two answers.
        errors = {answer: self._error(asked.lines, answer, step, values) for answer in (True, False)}
        passes = errors[True] is None
        if (error := errors[not passes]) is None:
            raise asked
        if (fails := errors[passes]) is not None:
            raise fails  # the step fails whatever this value is
        self._known[asked.lines] = Check(passes, error)

    def put_into(self, graph: fx.Graph) -> None:
        """Turn the assertions in the traced `graph` into nodes that raise the user's errors."""
        for node in graph.find_nodes(op="call_function", target=_ASSERT):
            value, message = node.args
            node.meta[EFFECT] = True
            if message.startswith(_MARK):
                node.target = self.made[int(message.removeprefix(_MARK))].check_value
                node.args = (value,)

    def _answer(self, value: Tensor, asked: UnknownValue) -> bool:
        if asked.lines in self._tried:
            return self._tried[asked.lines]
        if asked.lines not in self._known:
            raise asked
        check = self._known[asked.lines]
        if self._values is None:
            check_elements(value != 0, f"{_MARK}{len(self.made)}")
        else:
            self._values.append(value.detach().clone())  # a view's base may be changed later
        self.made.append(check)
        return check.passes

    def _error(self, lines: Stack, answer: bool, step: Step, values: Sequence[FakeTensor]) -> Exception | None:
        """Return the error that the step raises with that answer, or None if it continues."""
        self._tried = {lines: answer}
        try:
            # Run the step with that answer, on fake tensors.
            with values[0].fake_mode:
                self.followed(step, *values)
        except OverspillError:
            return None  # it has come further
        except Exception as error:  # noqa: BLE001 - whatever the user raises
            text = str(error).partition("\n")[0]
            try:
                return type(error)(text)
            except TypeError:
                return RuntimeError(text)
        finally:
            self._tried = {}
        return None


class _Reads(TorchFunctionMode):
    """Answers reads of unknown truth values by `answer`, while it is active."""

    def __init__(self, answer: Callable[[Tensor, UnknownValue], bool]) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except UnknownValue as asked:
            # Functional tensors ask for their truth value by item().
            if func not in _READS or (func is Tensor.item and args[0].dtype is not torch.bool):
                raise
            return self._answer(args[0], asked)
