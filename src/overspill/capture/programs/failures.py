"""What Inductor raises, as errors of ours.

Names private to PyTorch that this file relies on (2.11 to 2.14): `BackendCompilerFailed` and its `inner_exception`;
`InductorError` is one of these.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._dynamo.exc import BackendCompilerFailed

from overspill.core.errors import OverspillError, UnsupportedError, is_out_of_memory


@contextmanager
def inductor_failures(cure: str = "") -> Iterator[None]:
    """While this lasts, an error of ours that Inductor or Dynamo has wrapped comes as itself, and one of theirs as UnsupportedError.

    The latter ends with `cure`. Memory that has run out is theirs to tell.
    """
    try:
        yield
    except BackendCompilerFailed as failure:
        inner = failure.inner_exception
        if isinstance(inner, OverspillError):
            raise inner from None
        if is_out_of_memory(inner):
            raise
        line = str(inner).strip().splitlines()[:1]
        what = ": ".join([type(inner).__name__, *line])
        raise UnsupportedError(f"Inductor cannot compile this model ({what}){cure}") from failure
