"""No process group outlives its capture."""

import sys

import pytest
import torch.distributed as dist


@pytest.fixture(autouse=True)
def _nothing_is_left():
    hook = sys.excepthook
    yield
    assert not dist.is_initialized()
    assert sys.excepthook is hook
