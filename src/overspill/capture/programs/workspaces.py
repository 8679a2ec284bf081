"""What library calls allocate for themselves while they run: measured, by running each once.

A convolution may copy its inputs into another layout, and no text says so. So each library call of a program is run once on
zeros of its inputs' shapes, alone, before a plan is made; of equal calls one. Compiled kernels allocate nothing.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .allocations import allocations, peak_of

_known: dict[str, int] = {}
"""Workspaces in bytes by the signature of a call, for all programs of this process."""
_measures = ContextVar("overspill_measures", default=True)


@contextmanager
def nothing_measured() -> Iterator[None]:
    """While this lasts no library call is run: it is taken to allocate nothing for itself."""
    token = _measures.set(False)
    try:
        yield
    finally:
        _measures.reset(token)


def workspace_bytes(
    calls: Iterable[tuple[ast.expr, Sequence[str]]], namespace: Mapping[str, Any], values: Mapping[str, Any]
) -> list[int]:
    """Of each library call, given with the variables that it uses: bytes that it had beyond its results at most.

    `values` are the variables as fake tensors. While a profiler runs nothing can be measured; the user is then warned.
    """
    if not _measures.get():
        return [0 for _ in calls]
    signed = [(_signature(call, uses, values), call, uses) for call, uses in calls]
    new = {signature: (call, uses) for signature, call, uses in signed if signature not in _known}
    if new and torch.autograd._profiler_enabled():
        warnings.warn(
            "a profiler runs while a model is compiled: what its library calls allocate for themselves is not planned for",
            stacklevel=2,
        )
        return [_known.get(signature, 0) for signature, _, _ in signed]
    if new:
        with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng():
            _known.update(zip(new, _measured(list(new.values()), namespace, values), strict=True))
    return [_known[signature] for signature, _, _ in signed]


def _signature(call: ast.expr, uses: Sequence[str], values: Mapping[str, Any]) -> str:
    names = {name: f"v{i}" for i, name in enumerate(uses)}
    text = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), ast.unparse(call))
    shapes = [(v.shape, v.stride(), v.dtype, v.device) for n in uses if isinstance(v := values[n], Tensor)]
    return f"{torch.get_num_threads()} {text} {shapes}"


def _measured(
    calls: Sequence[tuple[ast.expr, Sequence[str]]], namespace: Mapping[str, Any], values: Mapping[str, Any]
) -> list[int]:
    with allocations() as found:
        for call, uses in calls:
            given = {name: _zeros(values[name]) for name in uses}
            code = compile(ast.fix_missing_locations(ast.Expression(call)), "<a library call>", "eval")
            with found.part():
                result = eval(code, dict(namespace), given)  # noqa: S307 - the user's own compiled program
            del given, result
    peaks = map(peak_of, found.by_part)
    return [most - max(results, 0) for most, results in peaks]


def _zeros(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    elements = value.untyped_storage().nbytes() // value.element_size()
    whole = torch.zeros(elements, dtype=value.dtype, device=value.device)
    return whole.as_strided(value.shape, value.stride(), value.storage_offset())
