"""Assume that values are finite and that nothing has converged.

Training code tests such values without expecting a surprise: whether the loss is a number, a gradient overflowed, or
LBFGS may stop early. Branching on any other value ends the estimate.
"""

from __future__ import annotations

import linecache
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from overspill.capture.fake_cuda.fake import FastFakeMode
from overspill.pytorch.dispatch import DisableTorchDispatch
from overspill.pytorch.fake_tensors import FakeTensor
from overspill.pytorch.optimizers import scale_settings

aten = torch.ops.aten
_TORCH = str(Path(torch.__file__).parent) + os.sep
_MODE = FastFakeMode.__torch_dispatch__.__code__.co_filename
_SCALAR = aten._local_scalar_dense.default
_ANSWER = "_overspill_answer"  # on a fake tensor: the truth value that all its elements have


def finite(observe: Callable[..., Any], fake_mode: Callable[[], Any]) -> Callable[..., Any]:
    """Wrap `observe` so that tests for finite values have a known result."""

    def watched(func: Any, args: Any, kwargs: Any, compute: Callable[..., Any]) -> Any:
        if func is _SCALAR and isinstance(args[0], FakeTensor) and args[0].constant is None and _for_lbfgs():
            return 1.0  # a tensor as the factor of another: `add_(direction, alpha=tensor)`
        # Know the truth value of the result, and its value if it is a single one.
        result = observe(func, args, kwargs, compute)
        rule = _RULES.get(func)
        if rule is not None and isinstance(result, FakeTensor) and result.constant is None:
            answer = rule(args)
            if answer is not None:
                setattr(result, _ANSWER, bool(answer))
                if result.numel() == 1:
                    _make_constant(result, answer, fake_mode())
        return result

    return watched


def _make_constant(tensor: FakeTensor, value: float, mode: Any) -> None:
    """Make the single value of `tensor` known to torch's constant propagation and `item`."""
    with DisableTorchDispatch():
        tensor.constant = torch.full(tuple(tensor.shape), value, dtype=tensor.dtype, device="cpu")
    mode.fake_tensor_converter.add_constant_storage_mapping(tensor)


def known(value: Any) -> bool | None:
    """Return the truth value that all elements of `value` share, or None if unknown."""
    return getattr(value, _ANSWER, None) if isinstance(value, torch.Tensor) else None


def _never(_: Any) -> bool | None:
    return False


def _equal(args: Any) -> bool | None:
    """Return the result of `x == x` and `x == inf`, as in `isfinite` and old code, or None if unknown."""
    if args[0] is args[1]:
        return True
    return False if isinstance(args[1], float) and not math.isfinite(args[1]) else None


def _unequal(args: Any) -> bool | None:
    answer = _equal(args)
    return None if answer is None else not answer


def _same(args: Any) -> bool | None:
    return known(args[0])


def _opposite(args: Any) -> bool | None:
    answer = known(args[0])
    return None if answer is None else not answer


def _both(args: Any) -> bool | None:
    answers = [known(args[0]), known(args[1])]
    return False if False in answers else True if answers == [True, True] else None


def _either(args: Any) -> bool | None:
    answers = [known(args[0]), known(args[1])]
    return True if True in answers else False if answers == [False, False] else None


def _count(args: Any) -> int | None:
    answer = known(args[0])
    return None if answer is None else answer * args[0].numel()


_RULES: dict[Any, Callable[[Any], int | None]] = {
    **dict.fromkeys((aten.isnan.default, aten.isinf.default, aten.isposinf.default, aten.isneginf.default), _never),
    **dict.fromkeys((aten.eq.Tensor, aten.eq.Scalar), _equal),
    **dict.fromkeys((aten.ne.Tensor, aten.ne.Scalar), _unequal),
    **dict.fromkeys((aten.logical_not.default, aten.bitwise_not.default), _opposite),
    **dict.fromkeys((aten.mul.Tensor, aten.logical_and.default, aten.bitwise_and.Tensor), _both),
    **dict.fromkeys((aten.logical_or.default, aten.bitwise_or.Tensor), _either),
    **dict.fromkeys((aten.sum.default, aten.count_nonzero.default), _count),
    **dict.fromkeys(
        (
            aten._is_any_true.default, aten._is_all_true.default, aten.any.default, aten.any.dim, aten.any.dims,
            aten.all.default, aten.all.dim, aten.all.dims, aten.max.default, aten.view.default,
            aten._unsafe_view.default, aten.detach.default, aten.clone.default, aten._to_copy.default,
            aten.alias.default,
        ),
        _same,
    ),
}  # fmt: skip


_LBFGS = sys.modules["torch.optim.lbfgs"].__file__  # torch.optim deletes the names of its own modules
# Questions of LBFGS that are true while it makes progress: the step is worth remembering, the line search is content.
# All its other questions are about tolerances, which are not reached.
_PROGRESS = ("ys >", "abs(gtd_new) <=", "bracket_f[0] <= bracket_f[-1]")


# (files below torch, function or all) -> the answer.
_ASSUMED = {
    ("optim/", ""): False,  # the larger of a known bound and a norm is the bound; an average has not begun
    ("nn/functional.py", "gaussian_nll_loss"): False,  # no variance is negative
    ("nn/modules/transformer.py", "_detect_is_causal_mask"): True,  # a square mask is the causal one
    ("distributions/", ""): True,  # parameters are valid
    ("__init__.py", "_check_tensor_all_with"): True,  # what a program checks is so
}


def goes_on(frame: FrameType | None) -> bool | None:
    """Return how torch's own code branches at `frame` if nothing is wrong or has converged.

    Returns None for all other code.
    """
    if frame is None:
        return None
    if frame.f_code.co_filename != _LBFGS:
        file = frame.f_code.co_filename.removeprefix(_TORCH)
        found = [
            answer
            for (where, name), answer in _ASSUMED.items()
            if file.startswith(where) and name in {"", frame.f_code.co_name}
        ]
        return found[0] if found and file != frame.f_code.co_filename else None
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return any(question in line for question in _PROGRESS)


_MATCHES = "linear_sum_assignment"  # scipy's: as many pairs as the shorter side of the costs, whatever they are


def decides_no_size(frame: FrameType | None) -> bool:
    """Return whether `frame` reads values only to match boxes with objects, as detectors do."""
    if frame is None:
        return False
    return frame.f_code.co_name == _MATCHES or f"{_MATCHES}(" in linecache.getline(
        frame.f_code.co_filename, frame.f_lineno
    )


def _for_lbfgs() -> bool:
    """Return whether the running op was called by LBFGS itself, not by its closure."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename in {__file__, _MODE}:
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _LBFGS


def initial_scale(scaler: torch.amp.GradScaler) -> float:
    """Return `GradScaler.get_scale` as if no gradient has overflowed."""
    scales, first = scale_settings(scaler)
    return first if scales else 1.0
