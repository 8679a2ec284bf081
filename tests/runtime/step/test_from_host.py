"""A model that begins in host memory, with the CPU in place of the GPU: the same bits, and what is frozen is read from
where it is. `tests/gpu_rehearsal/test_on_a_small_card.py` has the same on a card that is smaller than the model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.step.whole_steps import OPTIMIZERS, differences
from torch import Tensor, nn

import overspill
from overspill.core.errors import RequestError, UnsupportedError
from overspill.job import GradientOptions
from overspill.runtime.options import Options
from overspill.runtime.step.train_step import TrainStep
from overspill.runtime.transfer.lanes import HeldSlot
from overspill.runtime.transfer.stores import store_bytes

CPU = torch.device("cpu")
PLAIN = GradientOptions(1, None, None)
WIDTH, LAYERS = 128, 6


class Adapted(nn.Module):
    """Frozen layers with adapters, and statistics that forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.down = nn.ModuleList(nn.Linear(WIDTH, 8, bias=False) for _ in range(LAYERS))
        self.up = nn.ModuleList(nn.Linear(8, WIDTH, bias=False) for _ in range(LAYERS))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for base, down, up in zip(self.base, self.down, self.up, strict=True):
            x = torch.relu(base(x) + up(down(x)))
        return self.norm(x)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def optimizer_of(model: nn.Module, name: str = "adamw") -> torch.optim.Optimizer:
    return OPTIMIZERS[name](p for p in model.parameters() if p.requires_grad)


class Pair:
    """A model, and a plain copy of it."""

    def __init__(self, model: nn.Module, optimizer: str = "adamw") -> None:
        self.plain, self.model = copy.deepcopy(model), model
        self.plain_optimizer, self.optimizer = (optimizer_of(m, optimizer) for m in (self.plain, self.model))

    def check(self) -> None:
        assert not differences(self.plain, self.plain_optimizer, self.model, self.optimizer)


class Trained(Pair):
    """A model trained from host memory, and a copy of it by the plain loop."""

    def __init__(
        self,
        model: nn.Module,
        budget: str = "350KiB",
        optimizer: str = "adamw",
        gradients: GradientOptions = PLAIN,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer)
        self.gradients = gradients
        self.begin(budget, **options)

    def begin(self, budget: str, **options: Any) -> None:
        asked = Options(budget, store=options.pop("store", "host"), **options)
        self.step = TrainStep(self.model, loss_of, [self.optimizer], asked, self.gradients, from_host_to=CPU)

    def train(self, steps: int, batch: int = 16) -> None:
        for number in range(steps):
            x = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(number))
            assert torch.equal(self.step(x), self.plain_step(x))

    def plain_step(self, x: Tensor) -> Tensor:
        self.plain_optimizer.zero_grad()
        losses = [loss_of(self.plain, part) / self.gradients.accumulate for part in x.chunk(self.gradients.accumulate)]
        for loss in losses:
            loss.backward()
        if self.gradients.clip_norm is not None:
            trained = [p for p in self.plain.parameters() if p.requires_grad]
            nn.utils.clip_grad_norm_(trained, self.gradients.clip_norm)
        self.plain_optimizer.step()
        return torch.stack(losses).sum().detach() if len(losses) > 1 else losses[0].detach()


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return Adapted()


@pytest.mark.parametrize("store", [pytest.param("host", marks=pytest.mark.long), "disk"])
def test_steps_have_plain_bits_and_reads_between_them_change_nothing(model: nn.Module, store: str) -> None:
    trained = Trained(model, store=store, checksum=store == "disk")
    trained.train(2)
    trained.check()
    trained.train(2)
    trained.train(2, batch=9)
    assert [plan.model_on_host for plan in trained.step.plans] == [False, False]  # live bytes have no beginning
    trained.step.close()
    trained.check()
    assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["momentum", "adamw, fused", "adagrad", "adafactor"])
def test_every_optimizer_has_plain_bits(model: nn.Module, optimizer: str) -> None:
    trained = Trained(model, "smallest", optimizer)
    trained.train(3)
    trained.check()


@pytest.mark.long
@pytest.mark.parametrize("placement", [None, "planned"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_of_micro_batches_that_are_clipped_have_plain_bits(
    model: nn.Module, accumulate: int, placement: str | None
) -> None:
    trained = Trained(model, "600KiB", gradients=GradientOptions(accumulate, 0.1, None), placement=placement)
    trained.train(3)
    trained.step.synchronize()
    trained.check()
    trained.train(1)
    trained.check()


def test_frozen_weights_are_read_from_where_they_are_and_never_written(model: nn.Module) -> None:
    where = {name: p.data_ptr() for name, p in model.named_parameters() if not p.requires_grad}
    all_bytes = sum(p.nbytes for p in model.parameters())
    trained = Trained(model)
    trained.train(3)
    plan, engine = trained.step.plans[0], trained.step.engine
    stored = {plan.graph.tensors[t].name for t in plan.schedule.stored} & where.keys()
    assert len(stored) >= LAYERS - 1
    assert engine is not None
    held = {of.slot.tensor.data_ptr() for of in engine._table.values() if isinstance(of.slot, HeldSlot)}
    assert {where[name] for name in stored} <= held <= set(where.values())
    # The store has what updates change, and no place for what stays where it is.
    frozen = sum(plan.graph.tensors[t].nbytes for t in plan.schedule.stored if plan.graph.tensors[t].name in where)
    assert frozen > all_bytes / 2
    assert engine.store.capacity_bytes <= store_bytes(plan) - frozen
    # They are again what they were, in the memory that they had.
    parameters = dict(model.named_parameters())
    assert {name for name in stored if parameters[name].data_ptr() == where[name]} == stored
    trained.check()


@pytest.mark.long
def test_weights_of_a_file_that_is_mapped_are_read_from_it(model: nn.Module, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    with torch.device("meta"):
        mapped = Adapted()
    mapped.load_state_dict(torch.load(tmp_path / "model.pt", mmap=True), assign=True)
    trained = Trained(mapped)
    trained.plain, trained.plain_optimizer = plain, optimizer_of(plain)
    trained.train(3)
    assert not trained.step._state.holders.held
    trained.check()
    read = torch.load(tmp_path / "model.pt")
    assert torch.equal(read["base.0.weight"], mapped.base[0].weight)
    assert not torch.equal(read["up.0.weight"], mapped.up[0].weight)


@pytest.mark.long
def test_what_the_user_changes_while_it_is_in_host_memory_counts(model: nn.Module) -> None:
    trained = Trained(model)
    trained.train(1)
    for of in (trained.plain, model):
        with torch.no_grad():
            of.base[0].weight.mul_(0.5)
            of.up[1].weight.data = torch.full((WIDTH, 8), 0.1)
            of.load_state_dict({"down.2.weight": torch.ones(8, WIDTH)}, strict=False)
    trained.train(2)
    trained.check()


@pytest.mark.long
def test_an_optimizer_goes_on_with_the_state_of_a_checkpoint(model: nn.Module) -> None:
    first = Trained(model)
    first.train(2)
    state = copy.deepcopy(first.optimizer.state_dict())
    first.step.close()
    for optimizer in (first.plain_optimizer, first.optimizer):
        optimizer.load_state_dict(copy.deepcopy(state))
    first.begin("350KiB")
    first.train(2)
    first.check()
    assert any(name.endswith(".exp_avg") for name in first.step._state.residency.residents)


@pytest.mark.long
def test_a_weight_with_gaps_goes_to_the_device_at_once(model: nn.Module) -> None:
    with torch.no_grad():
        model.base[0].weight.data = torch.randn(WIDTH, 2 * WIDTH)[:, ::2]
    trained = Trained(model)
    trained.plain.load_state_dict(model.state_dict())
    trained.train(2)
    trained.check()
    assert not any("base.0.weight" in name for name in trained.step._state.residency.residents)


@pytest.mark.long
def test_a_step_that_is_given_up_leaves_the_weights_in_host_memory(model: nn.Module, monkeypatch: Any) -> None:
    trained = Trained(model)
    trained.train(2)
    before = copy.deepcopy(model.state_dict())
    x = torch.randn(16, WIDTH)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            trained.step(torch.randn(17, WIDTH))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(trained.step(x), trained.plain_step(x))
    trained.check()


def test_a_gpu_that_is_not_here_is_refused(model: nn.Module) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(RequestError, match="0 GPUs here"):
        overspill.train_step(model, loss_of, optimizer_of(model), device="cuda")


def test_a_model_on_another_device_is_refused() -> None:
    model = nn.Linear(4, 4, device="meta")
    with pytest.raises((RequestError, UnsupportedError), match="meta"):
        TrainStep(model, loss_of, [torch.optim.SGD(model.parameters())], Options(), PLAIN, from_host_to=CPU)
