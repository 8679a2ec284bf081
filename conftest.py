"""Settings of the whole suite: one compute thread a process, GPU tests only with a GPU.

Two processes share two cores, a forked child has one thread, and with several Inductor's kernels add up in an order that
changes.

Where it does not matter how good plans are, `auto` searches with a tenth of its effort; tests of their quality give an
`Effort` themselves. Random examples are the same in every run; `HYPOTHESIS_PROFILE=default make test` draws new ones.

`@pytest.mark.short("id", …)` leaves those parameters of a test to the short suite; the others are `long`.

`pytest --shuffle SEED` runs the tests in a random order, for no test may depend on one that ran before it.
"""

import gc
import logging
import os
import random
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OVERSPILL_EFFORT", "0.1")

import hypothesis.internal.conjecture.providers as drawing
import pytest
import torch
from hypothesis import HealthCheck, settings

# Else every process that a test starts compiles all that it imports, and each worker all test files.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
torch.set_num_threads(1)
# Dynamo empties the processor's caches to say in its log how long guards take: 35 ms for each graph.
torch._C._dynamo.guards.profile_guard_manager = lambda *_: 0.0
# For accelerators that are not there, `torch.manual_seed` keeps a printed stack each.
for accelerator in (torch.cuda, torch.mtia, torch.xpu):
    if not accelerator.is_available():
        accelerator.manual_seed_all = lambda _: None
# Loggers that do not propagate get a handler of pytest's, and this one renders all that is compiled for who has one.
logging.getLogger("torch.__trace").propagate = True
# How long an example takes to draw says how busy the machine is.
settings.register_profile("repeatable", derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(profile := os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
if profile == "repeatable":
    # Else any edit of any source changes what is drawn: constants are looked for in all of them, 3 s a process at first.
    drawing._get_local_constants = lambda: drawing._local_constants


@pytest.fixture(autouse=True)
def _nothing_beside() -> None:
    """What other tests hold is not next to the models of this one, where a plan would leave room for batches among it.

    Nor is the heap searched that they have left behind, each time that tensors or optimizers are looked for.
    """
    gc.collect()
    gc.freeze()  # what is frozen, `gc.get_objects` does not list


@pytest.fixture
def forget_compiled_code() -> Iterator[None]:
    """Each test compiles for itself: Dynamo keeps what it compiles, and allows eight graphs a function."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pytest_collection_finish() -> None:
    # What is imported stays: tests that collect garbage need not look at it each time, and none comes by itself so often.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    gc.get_freeze_count = lambda: 1  # it counts them one by one, and each recording asks whether there are any


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def leave_to_the_short_suite(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark as long all parameters that `short` does not name; each name must be that of one."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        if (short := item.get_closest_marker("short")) is not None:
            test, found = item.nodeid.split("[")[0], item.callspec.id
            unknown.setdefault(test, set(short.args)).discard(found)
            if found not in short.args:
                item.add_marker("long")
    if any(unknown.values()) and not any("::" in given for given in config.args):
        raise pytest.UsageError(f"no parameters: {[(test, *names) for test, names in unknown.items() if names]}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    leave_to_the_short_suite(config, items)
    # The longest ones first: begun last, they would run alone.
    items.sort(key=lambda item: item.path.name != "test_real_size.py")
    if config.option.shuffle is not None:
        # Files in a random order, and in each its tests: fixtures of a file are made once.
        drawn = random.Random(config.option.shuffle)
        places = {path: drawn.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (places[item.path], drawn.random()))
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
