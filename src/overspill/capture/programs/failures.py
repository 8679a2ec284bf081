"""Turn errors of Inductor and Dynamo into Overspill's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from overspill.core.errors import OverspillError, UnsupportedError, is_out_of_memory
from overspill.pytorch.dynamo import BackendCompilerFailed


@contextmanager
def inductor_failures(cure: str = "", of: type[Exception] = BackendCompilerFailed) -> Iterator[None]:
    """Raise the compiler's errors inside the block, those `of` a type, as Overspill's.

    Errors that wrap one of Overspill's are raised as that one, others as UnsupportedError. The message ends with
    `cure`. Running out of memory is raised unchanged.
    """
    try:
        yield
    except of as failure:
        inner = getattr(failure, "inner_exception", failure)
        if isinstance(inner, OverspillError):
            raise inner from None
        if is_out_of_memory(inner):
            raise
        line = str(inner).strip().splitlines()[:1]
        what = ": ".join([type(inner).__name__, *line])
        raise UnsupportedError(f"Inductor cannot compile this model ({what}){cure}") from failure
