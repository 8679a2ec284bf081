"""What the tests of the models share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def forget_compiled_graphs() -> Iterator[None]:
    """Dynamo allows eight graphs per function, and every compiled job shares TrainingStep.forward."""
    yield
    torch._dynamo.reset()
