"""Fix what `torch.compiler.is_compiling()` returns while a step is captured.

A capture promises the numbers of a reference, plain eager PyTorch or stock `torch.compile`, and models may branch on
whether they are compiled. So they get the answer that they would get from the reference.

Names private to PyTorch that this file relies on (2.11 to 2.14): that `torch._utils` and `torch._dynamo` ask
`torch.compiler.is_compiling`, and `torch.fx._symbolic_trace.is_fx_tracing`, which Dynamo answers with no.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from unittest.mock import patch

import torch
import torch.fx._symbolic_trace


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
