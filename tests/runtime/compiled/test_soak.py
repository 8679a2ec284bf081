"""Sessions that are made and dropped, shapes that come once, and many steps leave nothing behind in the process.

Dynamo keeps the graphs of a model that is gone until `torch._dynamo.reset()`, with text of every frame it has seen, and
torch.fx the source of every graph: with plain torch.compile(backend="aot_eager") about 600 KiB for each small model here,
of which a reset gives little back (2.13). So what is ours is looked for by name, and memory has that much room.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.runtime.step.whole_steps import Mlp, batch_for, cross_entropy
from torch import Tensor, nn

import overspill
from overspill.plans.plan import Plan
from overspill.runtime.compiled.session import Session
from overspill.runtime.step.plans import StepPlans
from overspill.runtime.step.state import StepState
from overspill.runtime.transfer.engine import TransferEngine
from overspill.runtime.transfer.lanes import Lane
from overspill.runtime.transfer.stores import Store

OURS = Session, StepPlans, StepState, TransferEngine, Lane, Store
Trained = Callable[[Tensor, Tensor], Tensor]


def ours(*kinds: type) -> Counter[str]:
    """How many there are of each of the things that a session has."""
    gc.collect()
    found: Counter[str] = Counter()
    for thing in gc.get_objects():
        found.update(kind.__name__ for kind in kinds if issubclass(type(thing), kind))
    return found


def held() -> tuple[Counter[str], int, int]:
    """What is ours, file descriptors, and threads."""
    counted = ours(*OURS)
    lanes = [thread for thread in threading.enumerate() if thread.name.startswith("overspill")]
    return counted, len(os.listdir("/proc/self/fd")), len(lanes)  # noqa: PTH208 - the descriptor of the listing is gone then


def resident_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def trained(model: nn.Module, kind: str, folder: Path, **asked: object) -> Trained:
    """What takes a step with `model`."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    options = {"budget": "4MiB", "store": "disk", "store_dir": folder} | asked
    if kind == "train_step":
        return overspill.train_step(model, cross_entropy, optimizer, **({"policy": "window"} | options))
    options = {"policy": "vdnn-all"} | options
    if kind == "compile":
        compiled = overspill.compile(model, **options)
    else:
        compiled = torch.compile(model, backend="overspill", options=options, dynamic=False)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(compiled, x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def use(kind: str, folder: Path, steps: int = 2, **asked: object) -> None:
    """Make a session, take some steps, and drop it."""
    model = Mlp()
    step, inputs = trained(model, kind, folder, **asked), batch_for(model)
    for _ in range(steps):
        step(*inputs)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()
    gc.collect()


@pytest.mark.parametrize("kind", ["train_step", "compile"])
def test_a_session_that_is_dropped_leaves_nothing_behind_though_dynamo_keeps_its_graphs(
    kind: str, tmp_path: Path
) -> None:
    before = held()
    for _ in range(2):
        use(kind, tmp_path)
        assert held() == before


@pytest.mark.long
def test_a_session_by_name_lives_as_long_as_the_graphs_that_dynamo_keeps(tmp_path: Path) -> None:
    before = held()
    use("name", tmp_path)
    use("name", tmp_path)  # with equal options, but weights of its own, which the graphs move
    assert held()[0]["Session"] == before[0]["Session"] + 2
    torch._dynamo.reset()
    assert held() == before


def test_a_model_that_is_dropped_between_forward_and_backward_has_the_same_gradients(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Mlp()
    inputs = batch_for(model)
    torch.manual_seed(2)
    cross_entropy(model, *inputs).backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch.manual_seed(2)
    before = held()
    loss = cross_entropy(
        overspill.compile(model, budget="4MiB", policy="vdnn-all", store="disk", store_dir=tmp_path), *inputs
    )
    gc.collect()
    loss.backward()
    assert all(
        torch.equal(a, b) for a, b in zip(expected, (p.grad for p in model.parameters()), strict=True) if a is not None
    )
    del loss
    assert held() == before


def test_plans_of_the_first_kinds_of_inputs_are_forgotten_where_there_are_too_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("overspill.runtime.step.plans.MOST_KINDS", 2)
    step = trained(model := Mlp(), "train_step", tmp_path)
    for size in (2, 3, 4, 2):
        step(*batch_for(model, size))
    assert len(step.plans) == 2  # type: ignore[attr-defined]


# -- for minutes


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("train_step", 100), ("compile", 50), ("name", 50)])
def test_two_hundred_sessions(kind: str, count: int, tmp_path: Path) -> None:
    use(kind, tmp_path)
    torch._dynamo.reset()
    before, plans = held(), ours(Plan)
    for number in range(count):
        use(kind, tmp_path)
        torch._dynamo.reset()
        if number == 9:
            warm = resident_bytes()
        assert held() == before
    assert ours(Plan) == plans
    assert resident_bytes() - warm < (count - 9) * 700 * 1024
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["train_step", "compile"])
def test_two_thousand_steps(kind: str, tmp_path: Path) -> None:
    model = Mlp()
    step, inputs = trained(model, kind, tmp_path), batch_for(model)
    for _ in range(100):
        step(*inputs)
    before, plans, warm = held(), ours(Plan), resident_bytes()
    objects = len(gc.get_objects())
    for _ in range(2000):
        step(*inputs)
    assert (held(), ours(Plan)) == (before, plans)
    assert abs(len(gc.get_objects()) - objects) < 500
    assert resident_bytes() - warm < 4 * 2**20


@pytest.mark.long
def test_five_hundred_shapes(tmp_path: Path) -> None:
    model = Mlp()
    step = trained(model, "train_step", tmp_path, budget="16MiB")
    sizes = [2 + number for number in range(500)]
    for size in sizes[:20]:
        step(*batch_for(model, size))
    before, warm = held(), resident_bytes()
    for size in sizes[20:]:
        step(*batch_for(model, size))
    assert held() == before
    assert resident_bytes() - warm < 480 * 2**20  # plans, and what torch keeps of each shape
    assert len(step.plans) == 500  # type: ignore[attr-defined]
    for size in (2, 501, 2):
        step(*batch_for(model, size))
    step.close()  # type: ignore[attr-defined]
    del step
    assert ours(Plan)["Plan"] == 0
