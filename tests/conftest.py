"""Settings of the whole suite: one compute thread a process (two processes share two cores), GPU tests only with a GPU.

Random examples are the same in every run; `HYPOTHESIS_PROFILE=default make test` draws new ones.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

from overspill.bounds import step_time as bound
from overspill.policies.auto import policy as auto
from overspill.policies.auto import search

torch.set_num_threads(1)
settings.register_profile("repeatable", derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

BRIEFLY_PLANNED = {"bench", "cli", "estimation", "papers", "report", "runtime", "simulate", "test_every_policy.py"}


@pytest.fixture(autouse=True)
def plans_are_made_briefly(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter how good plans are, `auto` searches, and its bound is proven, for a tenth of the time."""
    if BRIEFLY_PLANNED & {request.path.parent.name, request.path.name}:
        for module, name in ((search, "EFFORT"), (search, "MORE_EFFORT"), (bound, "EFFORT")):
            monkeypatch.setattr(module, name, getattr(module, name) // 10)
        monkeypatch.setattr(auto, "LINK_FACTOR", auto.LINK_FACTOR**5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # One of these takes minutes: begun last, it would run alone.
    items.sort(key=lambda item: item.path.name != "test_real_size.py")
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
