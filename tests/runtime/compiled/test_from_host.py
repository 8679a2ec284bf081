"""A compiled model that begins in host memory, with the CPU in place of the GPU.

`tests/gpu_rehearsal/test_on_a_small_card.py` has the same on a card that is smaller than the model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.step.test_from_host import CPU, LAYERS, WIDTH, Adapted, Pair
from torch import Tensor, nn

import overspill
from overspill.core.errors import RequestError, UnsupportedError
from overspill.runtime.compiled.session import Session
from overspill.runtime.step.away import Away
from overspill.runtime.transfer.lanes import HeldSlot
from overspill.runtime.transfer.stores import store_bytes

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]
BUDGET = "350KiB"


class Loops(Pair):
    """A loop on a model from host memory, and the same on a plain copy."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__(model)
        self.reference = torch.compile(self.plain, dynamic=False) if "partition" in options else self.plain
        self.session = Session(**{"budget": BUDGET, "store": "host", **options})
        self.session.begin_on_host(CPU)
        self.compiled = overspill.compile(model, session=self.session)

    def losses(self, steps: int, batch: int = 16) -> Iterator[tuple[Tensor, Tensor]]:
        """Train both, and yield their losses."""
        for number in range(steps):
            x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(number))
            found = []
            for call, of in ((self.reference, self.plain_optimizer), (self.compiled, self.optimizer)):
                loss = call(x).square().mean()
                loss.backward()
                nn.utils.clip_grad_norm_([p for group in of.param_groups for p in group["params"]], 0.1)
                of.step()
                of.zero_grad()
                found.append(loss.detach())
            yield found[0], found[1]

    def train(self, steps: int, batch: int = 16) -> None:
        assert all(torch.equal(*pair) for pair in self.losses(steps, batch))


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Adapted()


def held_of(session: Session) -> set[int]:
    """Return the addresses of what the store reads from where it is."""
    assert session.engine is not None
    return {of.slot.tensor.data_ptr() for of in session.engine._table.values() if isinstance(of.slot, HeldSlot)}


@pytest.mark.parametrize(
    "kernels", [{}, pytest.param({"backend": "inductor", "partition": 1.0}, marks=pytest.mark.long)], ids=len
)
def test_steps_have_plain_bits_and_frozen_weights_are_read_from_where_they_are(
    model: nn.Module, kernels: dict[str, Any]
) -> None:
    where = {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}
    loops = Loops(model, **kernels)
    loops.train(3)
    (plan,) = loops.session.plans
    stored = {plan.graph.tensors[t].name for t in plan.schedule.stored} & where.keys()
    assert len(stored) >= LAYERS - 1
    assert {where[name] for name in stored} <= held_of(loops.session) <= set(where.values())
    # The store has what updates change, and no place for what stays where it is.
    frozen = sum(plan.graph.tensors[t].nbytes for t in plan.schedule.stored if plan.graph.tensors[t].name in where)
    assert frozen > sum(p.nbytes for p in model.parameters()) / 2
    assert loops.session.engine is not None
    assert loops.session.engine.store.capacity_bytes <= store_bytes(plan) - frozen
    # A read brings one to the device; what is saved comes from the store, or from where it is.
    assert torch.equal(model.base[0].weight.sum(), loops.plain.base[0].weight.sum())
    saved = {name: tensor.data_ptr() for name, tensor in model.state_dict().items() if name in stored}
    assert [where[name] == address for name, address in saved.items()].count(True) >= LAYERS - 2
    loops.train(2)
    # Behind, all are in host memory again, these where they were.
    loops.session.synchronize()
    assert not any(isinstance(p, Away) for p in model.parameters())
    parameters = dict(model.named_parameters())
    assert {name for name in stored if parameters[name].data_ptr() == where[name]} >= stored - {"base.0.weight"}
    loops.check()
    loops.train(1, batch=9)
    loops.session.close()
    loops.check()


@pytest.mark.long
def test_weights_of_a_file_that_is_mapped_are_read_from_it(model: nn.Module, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        mapped = Adapted()
    mapped.load_state_dict(safetensors.load_file(tmp_path / "model.safetensors"), assign=True)
    mapped.base.requires_grad_(False)
    where = {p.data_ptr() for p in mapped.base.parameters()}
    assert all(_file_at(address) == str(tmp_path / "model.safetensors") for address in where)
    loops = Loops(mapped)
    loops.train(3)
    assert len(held_of(loops.session) & where) >= LAYERS - 1
    assert held_of(loops.session) <= where
    loops.check()
    read = safetensors.load_file(tmp_path / "model.safetensors")
    assert torch.equal(read["base.0.weight"], mapped.base[0].weight)
    assert not torch.equal(read["up.0.weight"], mapped.up[0].weight)


def _file_at(address: int) -> str:
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, path = line.split(maxsplit=5)
        begin, end = (int(bound, 16) for bound in span.split("-"))
        if begin <= address < end:
            return path
    return ""


@pytest.mark.long
def test_what_the_user_changes_between_steps_counts(model: nn.Module) -> None:
    loops = Loops(model)
    loops.train(1)
    state = copy.deepcopy(loops.plain_optimizer.state_dict())
    for of, optimizer in ((loops.plain, loops.plain_optimizer), (model, loops.optimizer)):
        with torch.no_grad():
            of.base[0].weight.mul_(0.5)
            of.up[1].weight.data = torch.full((WIDTH, 8), 0.1)
            of.load_state_dict({"down.2.weight": torch.ones(8, WIDTH)}, strict=False)
        optimizer.load_state_dict(copy.deepcopy(state))
    loops.train(2)
    loops.check()


def test_what_cannot_begin_in_host_memory_is_refused(model: nn.Module) -> None:
    if not torch.cuda.is_available():
        with pytest.raises(RequestError, match="0 GPUs here"):
            overspill.compile(model, device="cuda")
    with pytest.raises(RequestError, match="for a module"):
        overspill.compile(torch.relu, device="cuda")
    for options in ({"policy": "lms"}, {"placement": "planned"}):
        with pytest.raises(UnsupportedError, match="plans of 'auto'"):
            Session(**options).begin_on_host(CPU)
    with torch.no_grad():
        model.base[1].weight.data = model.base[0].weight.data
    with pytest.raises(UnsupportedError, match="share memory"):
        Loops(model).train(1)
