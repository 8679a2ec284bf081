"""TorchInductor: kernels and the programs that call them. Its import takes two seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch._inductor.codegen.common
import torch._inductor.compile_fx
import torch._inductor.dtype_propagation
import torch._inductor.sizevars
import torch._inductor.utils
from torch._inductor.codecache import PyCodeCache as PyCodeCache  # the programs that it has written: `load_by_key_path`
from torch._inductor.custom_graph_pass import (
    CustomPartitionerFn as CustomPartitionerFn,  # a partition of one's own; since 2.8
)
from torch._inductor.utils import ALIGNMENT as ALIGNMENT  # bytes that inputs of kernels are aligned to

from .patching import Target, patched

compile_fx = torch._inductor.compile_fx.compile_fx
"""Compile a graph as stock torch.compile does."""
compile_fx_inner = torch._inductor.compile_fx.compile_fx_inner
"""Compile one graph of forward or backward."""
align_inputs_from_check_idxs = torch._inductor.utils.align_inputs_from_check_idxs
"""The function around a program that copies unaligned inputs."""
clone_preserve_strides = torch._inductor.utils.clone_preserve_strides
"""Such a copy."""

_SIMPLIFIED = (
    Target(torch._inductor.sizevars, "simplify_index_in_vec_range"),
    Target(torch._inductor.sizevars, "stride_at"),
)
"""Functions of an index expression alone; Inductor keeps their last 128 results."""
_DTYPES = Target(torch._inductor.dtype_propagation.DtypePropagationOpsHandler, "__init__")
"""Makes the table of rules for dtypes, anew for each op of each kernel."""
MOST_KEPT = 1 << 14
"""Results kept here of each such function: a step has several hundred expressions, in each layer the same."""


@contextmanager
def work_kept() -> Iterator[None]:
    """Let Inductor do once in this process what it otherwise repeats for each layer and partition, inside the block.

    Simplify an index expression, make the table of dtypes. The programs that it writes are the same.
    """
    with patched([(*t, _keeping(t.now)) for t in _SIMPLIFIED] + [(*_DTYPES, _made_once(_DTYPES.now))]):
        yield


@cache
def _keeping(function: Any) -> Callable[..., Any]:
    """Return `function`, which keeps few results, as one that keeps many."""
    return lru_cache(MOST_KEPT)(function.__wrapped__)


@cache
def _made_once(make: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a function that calls `make` on an object only if there are more rules than the last time."""
    rules = torch._inductor.utils.op_dtype_propagation_rules, torch._inductor.codegen.common.pointwise_overrides_data
    made: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def make_once(handler: Any) -> None:
        if made.get(handler) != (there := [*map(len, rules)]):
            make(handler)
            made[handler] = there

    return make_once
