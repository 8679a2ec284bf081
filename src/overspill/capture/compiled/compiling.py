"""Fix what `torch.compiler.is_compiling()` returns while a step is captured.

A capture promises the numbers of a reference, plain eager PyTorch or stock `torch.compile`, and models may branch on
whether they are compiled. So they get the answer that they would get from the reference.

Names private to PyTorch that this file relies on (2.11 to 2.14): that `torch._utils` and `torch._dynamo` ask
`torch.compiler.is_compiling`, Dynamo's table `tracing_state_functions`, and `torch.fx._symbolic_trace.is_fx_tracing`,
which Dynamo answers with no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch

import torch
import torch.fx._symbolic_trace
from torch._dynamo.variables.torch import tracing_state_functions


def not_exporting() -> AbstractContextManager[Any]:
    """Have Dynamo answer `is_exporting()` with no, as of 2.13: before, models of transformers made masks for it.

    With such a mask a GPU takes another attention kernel than plain PyTorch does, and its numbers are others.
    """
    return patch.dict(tracing_state_functions(), {torch.compiler.is_exporting: False})


@contextmanager
def told(*, compiles: bool) -> Iterator[None]:
    """Make `is_compiling()` return `compiles` inside the block, for code of this thread only."""
    me = get_ident()

    def answering(plain: Callable[[], bool], answer: bool) -> Callable[[], bool]:
        return lambda: answer if get_ident() == me else plain()

    asked = (
        (torch.compiler, "is_compiling", compiles),
        (torch.compiler, "is_dynamo_compiling", compiles),
        (torch.fx._symbolic_trace, "is_fx_tracing", False),
    )
    with ExitStack() as stack:
        for where, name, answer in asked:
            stack.enter_context(patch.object(where, name, answering(getattr(where, name), answer)))
        yield
