"""Training under every policy equals plain PyTorch to the last bit: every small model, both stores, two optimizers.

One compilation serves four runs: the weights are put back, and the engine gets the other store.
"""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from overspill.core import Graph, LayerType
from overspill.models import load, names, optimizer_named
from overspill.models.step import TrainingStep
from overspill.policies import POLICIES
from overspill.policies.floor import floor_of
from overspill.policies.planning import unmanaged_peak
from overspill.policies.program import Program
from overspill.runtime.compile import compile_in
from overspill.runtime.session import Options, Session
from overspill.runtime.stores import DiskStore, HostStore
from overspill.runtime.tracker import LiveBytes
from overspill.runtime.training import same_bits

BATCH = 2
ALIASES = {"vgg11", "vgg13", "vgg16", "vgg19"}  # other names of vgg-a, vgg-b and vgg-e
STEPS = 3
State = dict[str, torch.Tensor]


class HalfwaySession(Session):
    """Gives `auto` a budget halfway between what is possible and what plain training needs; the others need no limit."""

    def _budget(self, graph: Graph, device, examples) -> int:
        unmanaged = unmanaged_peak(graph, device)
        return (floor_of(Program(graph)).nbytes + unmanaged) // 2 if self.options.policy == "auto" else 2 * unmanaged


def fresh(model: str) -> tuple[TrainingStep, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    job = load(model, small=True)
    return TrainingStep(job), job.make_batch(BATCH)


def steps(
    call: Callable[..., torch.Tensor],
    module: TrainingStep,
    batch: tuple[torch.Tensor, ...],
    optimizer: torch.optim.Optimizer,
) -> tuple[list[float], State]:
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = call(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in module.state_dict().items()}


@cache
def plain(model: str, optimizer: str) -> tuple[list[float], State]:
    module, batch = fresh(model)
    return steps(module, module, batch, optimizer_named(optimizer)(module.parameters()))


@pytest.fixture(autouse=True)
def forget_compiled_code():
    yield
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", [name for name in names() if name not in ALIASES])
def test_training_is_bit_identical_and_its_peak_is_as_planned(model: str, policy: str, tmp_path) -> None:
    if model == "bert-base":
        pytest.importorskip("transformers")
    module, batch = fresh(model)
    start = {name: value.clone() for name, value in module.state_dict().items()}
    session = HalfwaySession(Options(policy=policy, store="host"))
    session.watch(module, optimizer_named("adamw")(module.parameters()))
    compiled = compile_in(session, module, fullgraph=True)
    host, disk = HostStore(), DiskStore(tmp_path)
    for optimizer in ("adamw", "momentum"):
        for store in (host, disk):
            module.load_state_dict(start)
            if session.engine is not None:
                session.engine.store = store
            losses, state = steps(compiled, module, batch, optimizer_named(optimizer)(module.parameters()))
            expected_losses, expected = plain(model, optimizer)
            assert losses == expected_losses, (optimizer, store)
            assert [n for n, v in state.items() if not same_bits(v, expected[n])] == [], (optimizer, store)
    assert_peak_as_planned(session, compiled, module, batch)
    assert session.engine is not None
    plan = session.plans[0]
    convolutions = any(op.layer_type is LayerType.CONV for op in plan.graph.ops)
    if policy == "vdnn-all" or (policy == "vdnn-conv" and convolutions):
        assert plan.offloaded_bytes > 0
        assert session.engine.offloaded_bytes > 0
    # Where AdamW's update is the peak, nothing that auto could move or recompute lowers it, and it rightly does nothing.
    if policy == "checkpoint" or plan.peak_bytes < plan.unmanaged_peak_bytes:
        assert plan.offloaded_bytes + plan.recomputed_ops > 0
    assert session.engine.stored_count == 0, "every handle has given its slot back"


def assert_peak_as_planned(session: Session, compiled, module: TrainingStep, batch) -> None:
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
    assert tracker.peak_bytes >= 0.98 * planned
