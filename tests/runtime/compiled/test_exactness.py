"""Small models trained by `overspill.compile` in the smallest budget equals plain PyTorch, with both stores and two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.variants import others_long
from tests.runtime.compiled.lowered import built_in

from overspill.capture.compiled.graph import HANDLE_BYTES
from overspill.models import optimizer_named
from overspill.models.step import TrainingStep
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.options import Options
from overspill.runtime.reachable import same_bits
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.transfer.stores import DiskStore, HostStore

pytestmark = pytest.mark.usefixtures("forget_compiled_code")

State = dict[str, torch.Tensor]


def steps(
    call: Callable[..., torch.Tensor], module: TrainingStep, batch: tuple[torch.Tensor, ...], optimizer: str
) -> tuple[list[float], State]:
    torch.manual_seed(1)
    losses, stepping = [], optimizer_named(optimizer)(module.parameters())
    for _ in range(3):
        stepping.zero_grad()
        loss = call(*batch)
        loss.backward()
        stepping.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("model", others_long("resnet18"))  # test_schedules.py has more by any schedule
def test_training_is_bit_identical_and_its_peak_is_as_planned(model: str, tmp_path: Path) -> None:
    module, batch = built_in(model)
    plain, start = copy.deepcopy(module), copy.deepcopy(module.state_dict())
    session = Session(Options("smallest", store="host"))
    session.watch(module, optimizer_named("adamw")(module.parameters()))
    compiled = compile_in(session, module, fullgraph=True)
    for optimizer in ("adamw", "momentum"):
        plain.load_state_dict(start)
        expected_losses, expected = steps(plain, plain, batch, optimizer)
        for store in (HostStore(), DiskStore(tmp_path)):
            module.load_state_dict(start)
            if session.engine is not None:
                session.engine.use(store, torch.device("cpu"))
            losses, state = steps(compiled, module, batch, optimizer)
            assert losses == expected_losses, (optimizer, store)
            assert [n for n, v in state.items() if not same_bits(v, expected[n])] == [], (optimizer, store)
    assert_peak_as_planned(session, compiled, module, batch)
    assert session.engine is not None
    (made,) = session.plans
    if made.offloaded_bytes:
        assert session.engine.offloaded_bytes > 0
    # Where AdamW's update is the peak, nothing that could move or be recomputed lowers it, and the policy rightly does nothing.
    assert made.offloaded_bytes + made.recomputed_ops > 0 or made.peak_bytes == made.unmanaged_peak_bytes
    assert session.engine.stored_count == 0, "every handle has given its slot back"
    session.close()


def assert_peak_as_planned(session: Session, compiled: Any, module: TrainingStep, batch: Any) -> None:
    """A further step under the tracker, which counts live storages independently of the planner."""
    tracker = LiveBytes(torch.device("cpu"))
    optimizer = optimizer_named("adamw")(module.parameters())
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            tracker.add([*module.parameters(), *module.buffers(), *batch])
            tracker.add(v for p in module.parameters() for v in optimizer.state[p].values())
            session.tracker = tracker
        loss = compiled(*batch)
        if step == 1:
            with tracker:
                loss.backward()
                optimizer.step()
        else:
            loss.backward()
            optimizer.step()
    session.tracker = None
    planned = session.peak_bytes
    assert tracker.peak_bytes <= planned
    # A step of many small tensors has room for more handles than it uses.
    handles = max(HANDLE_BYTES * sum(t.movable for t in plan.graph.tensors) for plan in session.plans)
    assert tracker.peak_bytes + handles >= 0.98 * planned
