"""The virtual GPU, for tests that take `gpu`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from overspill.capture.virtual_gpu.gpu import VirtualGpu


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with warnings.catch_warnings(), VirtualGpu() as virtual:
        warnings.simplefilter("error")
        yield virtual
