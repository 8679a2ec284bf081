"""Between steps a job gives the device to another program, and goes on with the bits of plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor, nn
from torch.nn import functional

import overspill
from overspill.core.errors import InfeasibleBudgetError, RequestError, StoreError
from overspill.runtime.parking import Parked

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]
CPU = torch.device("cpu")


class Net(nn.Module):
    """Layers with dropout, a frozen and a tied weight, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Tanh()) for _ in range(4)))
        self.norm, self.last = nn.BatchNorm1d(64), nn.Linear(64, 64)
        self.last.weight = self.layers[0][0].weight  # type: ignore[index]
        self.layers[1][0].weight.requires_grad_(False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return functional.mse_loss(self.last(self.norm(self.layers(x))), x)


def nets() -> tuple[Net, Net]:
    torch.manual_seed(0)
    plain = Net()
    return plain, copy.deepcopy(plain)


def batches() -> list[Tensor]:
    return list(torch.randn(5, 32, 64, generator=torch.Generator().manual_seed(1)))


def adamw(net: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW((p for p in net.parameters() if p.requires_grad), 1e-2)


def plainly(net: Net, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    torch.manual_seed(2)
    losses = []
    for x in batches():
        losses.append(net(x))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def check(plain: Net, ours: Net, before: torch.optim.Optimizer, after: torch.optim.Optimizer) -> None:
    pairs = zip(plain.state_dict().items(), ours.state_dict().values(), strict=True)
    assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []
    for one, other in zip(before.state_dict()["state"].values(), after.state_dict()["state"].values(), strict=True):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.short("60%-next call", "100%-unpark")
@pytest.mark.parametrize(  # with weights that move, and without
    ("budget", "again"), by_turns(["60%", "100%"], ["next call", "unpark", "other budget"])
)
def test_a_compiled_loop_parks_between_its_steps(budget: str, again: str, tmp_path: Path) -> None:
    plain, ours = nets()
    losses = plainly(plain, before := adamw(plain))
    after = adamw(ours)
    model = overspill.compile(ours, budget=budget, store_dir=tmp_path)
    session = model.overspill
    torch.manual_seed(2)
    for step, (x, expected) in enumerate(zip(batches(), losses, strict=True)):
        loss = model(x)
        loss.backward()
        after.step()
        after.zero_grad()
        assert torch.equal(loss, expected)
        if step in (1, 3):
            parameters = [p for p in ours.parameters() if not isinstance(p, overspill.runtime.step.away.Away)]
            assert session.park() > 0
            assert not parameters or session._parked
            if again == "unpark":
                session.unpark()
            if again == "other budget":
                session.unpark("70%" if step == 1 else "60%")
    assert not session._parked
    check(plain, ours, before, after)


@pytest.mark.long
def test_a_new_budget_is_in_force_from_the_next_call_on() -> None:
    _, net = nets()
    model = overspill.compile(net, budget="1GiB", optimizer=(optimizer := adamw(net)))
    for asked in (1 << 30, 300_000, None):
        if asked == 300_000:
            model.overspill.unpark(asked)
        if asked is None:
            model.overspill.unpark("1KiB")
            with pytest.raises(InfeasibleBudgetError):
                model(batches()[0])
            break
        model(batches()[0]).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert {plan.budget_bytes for plan in model.overspill.plans} == {asked}


@pytest.mark.short("60%")
@pytest.mark.parametrize("budget", ["60%", "100%"])
def test_a_step_parks_between_two_calls(budget: str) -> None:
    plain, ours = nets()
    losses = plainly(plain, before := adamw(plain))
    step = overspill.train_step(ours, lambda net, x: net(x), after := adamw(ours), budget=budget, store="host")
    torch.manual_seed(2)
    for number, (x, expected) in enumerate(zip(batches(), losses, strict=True)):
        if number == 2:
            weights = sum(p.nbytes for p in ours.parameters())
            step.unpark("70%" if budget == "60%" else None)
            assert step.park() > (0 if budget == "60%" else weights)
            assert all(resident.here is None for resident in step._state.residency.residents.values())
        assert torch.equal(step(x), expected)
    check(plain, ours, before, after)


def test_nothing_is_parked_between_a_forward_and_its_backward() -> None:
    _, net = nets()
    model = overspill.compile(net, budget="1GiB")
    loss = model(batches()[0])
    with pytest.raises(RequestError, match="between a forward"):
        model.overspill.park()
    loss.backward()
    assert model.overspill.park() > 0


def test_an_update_finds_gradients_and_weights_where_they_were() -> None:
    plain, ours = nets()
    x = batches()[0]
    for net, model in ((plain, plain), (ours, overspill.compile(ours, budget="1GiB"))):
        torch.manual_seed(2)
        optimizer = adamw(net)
        model(x).backward()
        if model is not plain:
            model.overspill.park()
        optimizer.step()
    assert not model.overspill._parked
    pairs = zip(plain.parameters(), ours.parameters(), strict=True)
    assert all(
        torch.equal(one, other) and (one.grad is None or torch.equal(one.grad, other.grad)) for one, other in pairs
    )


def test_tensors_that_share_memory_share_it_there_and_back(tmp_path: Path) -> None:
    flat = torch.arange(1000.0)
    views = [flat[10:20], flat.view(10, 100).t(), flat]
    expected = [view.clone() for view in views]
    parked = Parked(tmp_path)
    assert parked.send(views, CPU) == 4000
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1
    assert all(map(torch.equal, views, expected))
    assert parked.send(views, CPU) == 0
    views[0].add_(1)  # seen by the others, wherever they are
    new = views[1].data = torch.zeros(3)
    parked.bring()
    assert torch.equal(views[0], flat[10:20])
    assert flat[10] == 11
    assert views[1].data_ptr() == new.data_ptr()
    assert list(tmp_path.iterdir()) == []


def no_room(*_: object) -> None:
    raise OSError("No space left on device")


@pytest.mark.short("0")
@pytest.mark.parametrize("fails_at", [0, 2])
def test_without_room_all_values_stay_and_training_goes_on(fails_at: int) -> None:
    plain, ours = nets()
    losses = plainly(plain, before := adamw(plain))
    after = adamw(ours)
    model = overspill.compile(ours, budget="1GiB")
    torch.manual_seed(2)
    made: list[object] = []
    real: Callable[..., torch.UntypedStorage] = torch.UntypedStorage.from_file

    def from_file(*args: object) -> torch.UntypedStorage:
        made.append(args)
        return no_room() if len(made) > fails_at else real(*args)  # type: ignore[return-value, func-returns-value]

    for x, expected in zip(batches(), losses, strict=True):
        loss = model(x)
        loss.backward()
        after.step()
        after.zero_grad()
        assert torch.equal(loss, expected)
        made.clear()
        with patch.object(torch.UntypedStorage, "from_file", from_file), pytest.raises(StoreError, match="no room"):
            model.overspill.park()
    check(plain, ours, before, after)
