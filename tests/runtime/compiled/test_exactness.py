"""Training under every policy equals plain PyTorch to the last bit: every small model by every policy.

Two ways. *Lowered*: a model is captured once, and every policy's plan of it is lowered and run directly, with its bytes,
its slots and its peak. *Compiled*: whole training steps through torch.compile, both stores and two optimizers for
`auto` on every model, and every policy on one; one compilation serves all runs, with the weights put back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.variants import MODELS, OTHERS_AND_DEEP_LONG, OWN
from tests.runtime.compiled.lowered import Step, captured_step, moved_bytes, plan, run

from overspill.capture.compiled.graph import HANDLE_BYTES
from overspill.core import LayerType, Verb
from overspill.core.errors import InfeasibleBudget
from overspill.devices import this_cpu
from overspill.models import load, optimizer_named
from overspill.models.step import TrainingStep
from overspill.plans.plan import unmanaged_peak
from overspill.policies import POLICIES
from overspill.runtime.compiled.beside import Problem
from overspill.runtime.compiled.compile import compile_in
from overspill.runtime.compiled.session import Session
from overspill.runtime.compiled.session_budget import SessionBudget
from overspill.runtime.options import Options
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.training import same_bits
from overspill.runtime.transfer.stores import DiskStore, HostStore
from overspill.simulate import check

BATCH = 2
OTHERS = [name for name in POLICIES if name != "auto"]
BY_TURNS = ("unet", "gpt2")
COMPILED = [
    pytest.param(model, policy, marks=() if i % len(BY_TURNS) == k else pytest.mark.long)
    for i, policy in enumerate(OTHERS)
    for k, model in enumerate(BY_TURNS)
]
"""Every policy through the compiler on one of these models; on all of them in the long suite."""
SHORT = ("auto", "window")
LOWERED = [
    pytest.param(
        model.values[0],
        policy,
        marks=model.marks or (() if policy in SHORT or model.values[0] == "resnet18" else pytest.mark.long),
    )
    for model in OTHERS_AND_DEEP_LONG
    for policy in POLICIES
]
"""Every policy on one model, and those that differ most on all that are not deep; in the long suite all on all."""
ON_DISK = 3
"""Of the lowered runs, every how many-th keeps its bytes in a file."""
State = dict[str, torch.Tensor]


class HalfwayBudget(SessionBudget):
    """A budget halfway between the policy's floor and what plain training needs, where the policy plans for one."""

    def bytes_for(self, problem: Problem, *_: Any, **__: Any) -> int:
        graph, device = problem.alone, problem.device
        unmanaged = unmanaged_peak(graph, device)
        policy = POLICIES[problem.options.policy]
        if not policy.plans_for_budget:
            return 2 * unmanaged
        try:
            policy().plan(graph, device, 1)
        except InfeasibleBudget as error:
            return error.floor_bytes + max(0, unmanaged - error.floor_bytes) // 2
        return unmanaged


def fresh(model: str) -> tuple[TrainingStep, tuple[torch.Tensor, ...]]:
    if model == "bert-base":
        pytest.importorskip("transformers")
    torch.manual_seed(0)
    job = load(model, small=True)
    return TrainingStep(job), job.make_batch(BATCH)


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


# -- lowered


@cache
def captured(model: str) -> Step:
    return captured_step(*fresh(model))


@pytest.mark.parametrize(("model", "policy"), LOWERED)
def test_the_lowered_step_gives_the_numbers_of_plain_pytorch_and_moves_what_is_planned(
    model: str, policy: str, tmp_path: Path
) -> None:
    step = captured(model)
    schedule = plan(step.graph, this_cpu(), policy)
    planned = check(step.graph, schedule)
    on_disk = (MODELS.index(model) + list(POLICIES).index(policy)) % ON_DISK == 0
    ran = run(step, schedule, DiskStore(tmp_path) if on_disk else HostStore())
    assert step.plain.differences(ran.numbers) == []
    assert ran.offloaded_bytes == moved_bytes(step.graph, schedule, Verb.OFFLOAD)
    assert ran.prefetched_bytes == moved_bytes(step.graph, schedule, Verb.PREFETCH)
    assert ran.slots_left == 0
    assert ran.peak_bytes <= planned.peak_bytes
    # A step of many small tensors has room for more handles than it uses.
    room_for_handles = HANDLE_BYTES * sum(t.movable for t in step.graph.tensors)
    assert ran.peak_bytes + room_for_handles >= 0.98 * planned.peak_bytes


# -- compiled


def steps(
    call: Callable[..., torch.Tensor],
    module: TrainingStep,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer,
    count: int,
) -> tuple[list[float], State]:
    torch.manual_seed(1)
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@cache
def plain(model: str, optimizer: str, count: int) -> tuple[list[float], State]:
    module, batch = fresh(model)
    return steps(module, module, batch, optimizer_named(optimizer)(module.parameters()), count)


def train_as_plain(model: str, policy: str, tmp_path: Path, optimizers: Sequence[str], stores: int, count: int) -> None:
    """Every optimizer with every store, then the peak."""
    module, batch = fresh(model)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    session = Session(Options(policy=policy, store="host"))
    session._budget = HalfwayBudget(session.options)
    session.watch(module, optimizer_named("adamw")(module.parameters()))
    compiled = compile_in(session, module, fullgraph=True)
    for store in (HostStore(), DiskStore(tmp_path))[:stores]:
        for optimizer in optimizers:
            module.load_state_dict(start)
            if session.engine is not None:
                session.engine.use(store, torch.device("cpu"))
            losses, state = steps(compiled, module, batch, optimizer_named(optimizer)(module.parameters()), count)
            expected_losses, expected = plain(model, optimizer, count)
            assert losses == expected_losses, (optimizer, store)
            assert [n for n, v in state.items() if not same_bits(v, expected[n])] == [], (optimizer, store)
    assert_peak_as_planned(session, compiled, module, batch)
    assert session.engine is not None
    made = session.plans[0]
    convolutions = any(op.layer_type is LayerType.CONV for op in made.graph.ops)
    if policy == "vdnn-all" or (policy == "vdnn-conv" and convolutions):
        assert made.offloaded_bytes > 0
    if made.offloaded_bytes:
        assert session.engine.offloaded_bytes > 0
    # Where AdamW's update is the peak, nothing that auto could move or recompute lowers it, and it rightly does nothing.
    if policy == "checkpoint" or made.peak_bytes < made.unmanaged_peak_bytes:
        assert made.offloaded_bytes + made.recomputed_ops > 0
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


@pytest.mark.parametrize("model", [name for name in OTHERS_AND_DEEP_LONG if name.values[0] in OWN])
def test_training_is_bit_identical_and_its_peak_is_as_planned(model: str, tmp_path: Path) -> None:
    train_as_plain(model, "auto", tmp_path, ("adamw", "momentum"), stores=2, count=3)


@pytest.mark.parametrize(("model", "policy"), COMPILED)
def test_training_under_every_policy_is_bit_identical(model: str, policy: str, tmp_path: Path) -> None:
    train_as_plain(model, policy, tmp_path, ("momentum",), stores=1, count=2)
