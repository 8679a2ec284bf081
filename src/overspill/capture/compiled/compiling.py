"""What code is told that asks whether it is compiled, while a step is captured.

A capture promises the numbers of a reference, plain eager PyTorch or stock `torch.compile`, and models take other ways where they
are compiled. So they are told what the reference tells them.

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
    """While this lasts code of this thread is told that it is compiled, or that it is not; that of others gets its own answer."""
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
