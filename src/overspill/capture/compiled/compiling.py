"""Fix what `torch.compiler.is_compiling()` returns while a step is captured, and trace through compiled parts.

A capture promises the numbers of a reference: plain eager PyTorch or stock `torch.compile`. Models may branch on
whether they are compiled, so they get the answer that the reference would give. Blocks and functions that the user has
compiled run uncompiled meanwhile, because the capture follows Python that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch

from overspill.pytorch.dynamo import (
    CALLBACK,
    FULLGRAPH_COUNT,
    IS_COMPILING,
    compile_lock,
    dynamo_config,
    tracing_state_functions,
)
from overspill.pytorch.graphs import IS_FX_TRACING
from overspill.pytorch.patching import Target, patched


def not_exporting() -> AbstractContextManager[Any]:
    """Make Dynamo answer `is_exporting()` with False, as it does since 2.13.

    Before, models of transformers made attention masks under Dynamo. With such a mask a GPU takes another attention
    kernel than plain PyTorch does, and its numbers differ.
    """
    return patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})


@contextmanager
def answering_is_compiling(*, compiles: bool) -> Iterator[None]:
    """Make `is_compiling()` return `compiles` inside the block, for code of this thread only.

    Nothing compiles inside the block.
    """
    me, config = get_ident(), dynamo_config

    def answering(plain: Callable[..., Any], answer: Any, everywhere: bool) -> Callable[..., Any]:
        def answered(*given: Any) -> Any:
            is_asked = get_ident() == me and (everywhere or not config.allow_empty_graphs)
            return answer if is_asked else plain(*given)

        return answered

    asked = (
        (Target(torch.compiler, "is_compiling"), compiles, True),
        (Target(torch.compiler, "is_dynamo_compiling"), compiles, True),
        (IS_FX_TRACING, False, True),
        # Not within torch.cond and its like, which compile their branches themselves, with `allow_empty_graphs`.
        (CALLBACK, None, False),
        (FULLGRAPH_COUNT, 0, False),
    )
    with ExitStack() as stack:
        stack.enter_context(config.patch(error_on_nested_fx_trace=False))
        stack.enter_context(
            patched(
                [
                    (*target, answering(target.now, answer, everywhere))
                    for target, answer, everywhere in asked
                    if target.is_there
                ]
            )
        )
        yield


@contextmanager
def as_eager() -> Iterator[None]:
    """Make `is_compiling()` return False inside the block, also where this thread compiles a graph.

    What runs there by itself, as a trial of an optimizer, runs as it will in the training loop. While another thread
    compiles, the answer stays True, as for all other code.
    """
    if not (torch.compiler.is_compiling() and compile_lock.acquire(blocking=False)):
        yield
        return
    try:
        with patched([(*IS_COMPILING, False)]):
            yield
    finally:
        compile_lock.release()
