"""Plain loops at budgets below weights, gradients and optimizer state have the bits of plain PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.runtime.compiled.whole_budget_loops import OPTIMIZERS, WIDTH, Run, adamw, batch, begin, compare, loss_of, net
from tests.turns import rest_long
from torch import Tensor, nn
from torch.nn import functional

import overspill
from overspill.core.errors import InfeasibleBudgetError, OverspillError, RequestError, StoreError
from overspill.runtime.transfer.engine import TransferEngine

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]

either_way = pytest.mark.parametrize("how", ["compile", pytest.param("by name", marks=pytest.mark.long)])


@pytest.mark.short("adamw-host")
@pytest.mark.parametrize(
    ("name", "store"),
    [
        ("sgd", "disk"), ("adamw", "host"),
        *(pytest.param(n, "host", marks=pytest.mark.long) for n in ("fused", "adagrad", "adafactor")),
    ],
)  # fmt: skip
def test_optimizers_with_clipping(name: str, store: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run, OPTIMIZERS[name])
        for i in range(4):
            loss = loss_of(compiled, i)
            loss.backward()
            run.see(loss, nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "35%", store)


@pytest.mark.long
def test_a_setting_that_turns_state_on_or_off_changes_between_steps() -> None:
    def loop(run: Run) -> None:
        _, compiled, optimizer = begin(run)
        for i in range(4):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (i % 2)
            loss = loss_of(compiled, i)
            loss.backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            run.see(loss)

    compare(loop)


@pytest.mark.long
def test_a_loss_reads_a_weight_before_forward() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            term = model[4].weight.square().sum() if i > 1 else torch.zeros(())
            loss = loss_of(compiled, i) + 0.01 * term
            loss.backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            run.see(loss)

    compare(loop)


@pytest.mark.long
def test_graphs_of_weights_that_never_go_backward_are_kept() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        kept = []
        for i in range(5):
            kept.append(model[4].weight.square().sum())
            loss = loss_of(compiled, i)
            loss.backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
        run.see(*kept)

    compare(loop)


@pytest.mark.long
def test_gradients_are_read_behind_each_step() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(4):
            loss_of(compiled, i).backward()
            optimizer.step()
            run.moves()
            run.see(*(p.grad for p in model.parameters()))
            optimizer.zero_grad()

    compare(loop)


@pytest.mark.long
def test_gradients_are_read_behind_each_step_though_the_first_was_not_planned() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(4):
            optimizer.zero_grad()
            compiled(batch(i, rows=96)).square().mean().backward()
            if i == 0:
                optimizer.param_groups[0]["amsgrad"] = True
            optimizer.step()
            run.see(*(p.grad for p in model.parameters()))

    compare(loop, budget="70%")


@pytest.mark.parametrize("zeros", rest_long(["before", "between", "never"], ["never"]))
def test_accumulation(zeros: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(6):
            if zeros == "before" and i % 2 == 0:
                optimizer.zero_grad(set_to_none=False)
            loss = loss_of(compiled, i) / 2
            if zeros == "between" and i % 2 == 0:
                optimizer.zero_grad()
            loss.backward()
            run.see(loss)
            if i % 2:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                optimizer.step()
                run.moves()

    compare(loop)


@pytest.mark.long
def test_sums_of_gradients_that_are_both_on_the_device_and_in_the_store_are_clipped() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(4):
            loss_of(compiled, i).backward()
            if i % 2:
                run.see(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
                optimizer.step()
                optimizer.zero_grad()
        run.moves()

    compare(loop, "36%")


@pytest.mark.long
def test_an_optimizer_with_other_settings_is_made_behind_the_backward() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            loss_of(compiled, i).backward()
            if i == 3:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.1, 0.2))
                run.optimizers = [optimizer]
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "60%")


@pytest.mark.long
def test_two_optimizers_take_turns_over_the_same_parameters() -> None:
    def loop(run: Run) -> None:
        model = net()
        parameters = list(model.parameters())
        compiled = run.begin(model, (adamw, parameters), (OPTIMIZERS["sgd"], parameters))
        for i in range(4):
            loss_of(compiled, i).backward()
            run.optimizers[i % 2].step()
            run.moves()
            model.zero_grad()

    compare(loop, "60%")


def test_two_optimizers_over_parts() -> None:
    def loop(run: Run) -> None:
        model = net()
        parameters = list(model.parameters())
        compiled = run.begin(model, (adamw, parameters[:5]), (OPTIMIZERS["sgd"], parameters[5:]))
        for i in range(4):
            loss_of(compiled, i).backward()
            for optimizer in run.optimizers:
                optimizer.step()
            run.moves()
            run.see(*(p.grad for p in parameters))
            model.zero_grad()

    compare(loop, "45%", "disk")


def test_steps_by_a_closure() -> None:
    def loop(run: Run) -> None:
        _, compiled, optimizer = begin(run)
        for i in range(3):

            def closure(seed: int = i) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(compiled, seed)
                loss.backward()
                return loss

            run.see(optimizer.step(closure))
            run.moves()
            if run.session is not None:
                residents = run.session.loop.state.residency.residents
                away.append({name for name, resident in residents.items() if resident.away})
        optimizer.zero_grad()

    away: list[set[str]] = []
    compare(loop)
    assert away[0] == away[1] == away[2] != set(), "the first update is not as planned"


@pytest.mark.long
def test_dropout_batch_norm_and_evaluation_between() -> None:
    def loop(run: Run) -> None:
        torch.manual_seed(0)
        layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Dropout(0.3))
        model = nn.Sequential(*(copy.deepcopy(m) for _ in range(4) for m in layers))
        compiled = run.begin(model, (adamw, list(model.parameters())))
        for i in range(4):
            torch.manual_seed(i)
            loss_of(compiled, i).backward()
            run.optimizers[0].step()
            run.moves()
            run.optimizers[0].zero_grad()
            model.eval()
            with torch.no_grad():
                run.see(compiled(batch(50 + i)))
            with torch.inference_mode():
                run.see(compiled(batch(60 + i)).sum().item())
            model.train()

    compare(loop)


@pytest.mark.long
class Masked(nn.Module):
    """A net that NumPy draws a mask for, and that another is given to, as wav2vec 2.0 has them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(3), net(3)

    def forward(self, x: Tensor, noise: np.ndarray) -> Tensor:
        drawn = torch.from_numpy((np.random.rand(WIDTH) > 0.5).astype(np.float32))  # noqa: NPY002 - as wav2vec 2.0 draws
        given = torch.from_numpy((noise > 0.5).astype(np.float32))
        value: Tensor = self.second(self.first(x) * drawn) * given
        return value


@pytest.mark.long
def test_numpy_draws_masks_and_gives_inputs() -> None:
    def loop(run: Run) -> None:
        np.random.seed(0)  # noqa: NPY002
        model = Masked()
        compiled = run.begin(model, (adamw, list(model.parameters())))
        for i in range(3):
            loss = compiled(batch(i), np.random.rand(WIDTH)).square().mean()  # noqa: NPY002
            loss.backward()
            run.see(loss)
            run.optimizers[0].step()
            run.optimizers[0].zero_grad()

    compare(loop, budget="70%")


@pytest.mark.long
def test_tied_weights_second_backwards_and_shapes() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.body = nn.Embedding(WIDTH, WIDTH), net(3)
            self.out = nn.Linear(WIDTH, WIDTH, bias=False)
            self.out.weight = self.table.weight

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.out(self.body(self.table(tokens)))
            return found

    def loop(run: Run) -> None:
        torch.manual_seed(0)
        model = Tied()
        compiled = run.begin(model, (adamw, list(model.parameters())))
        for i, count in enumerate((8, 8, 5, 8)):
            tokens = torch.randint(WIDTH, (count,), generator=torch.Generator().manual_seed(i))
            loss = functional.cross_entropy(compiled(tokens), tokens)
            loss.backward(retain_graph=True)
            loss.backward()
            run.see(loss, model.table.weight.grad)
            run.optimizers[0].step()
            run.moves()
            model.zero_grad()

    compare(loop, "60%")


def test_scaled_gradients_with_a_step_that_is_left_out() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        for i in range(5):
            loss = compiled(batch(i) * (1e30 if i == 2 else 1)).square().mean()
            scaler.scale(loss).backward()
            if i % 2:
                scaler.unscale_(optimizer)
                run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            run.moves()
            optimizer.zero_grad()
            run.see(scaler.get_scale())

    compare(loop)


@pytest.mark.long
def test_a_step_that_an_error_stopped_is_not_taken_for_a_whole_one(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("45%", "host")
    model, compiled, optimizer = begin(run)

    def step(seed: int) -> None:
        loss_of(compiled, seed).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    step(1)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def go_back() -> None:
        model.load_state_dict(before[0])
        optimizer.load_state_dict(copy.deepcopy(before[1]))  # which takes counts of steps as they are
        optimizer.zero_grad()

    step(2)
    expected = [p.detach().clone() for p in model.parameters()]
    go_back()
    loss_of(compiled, 2).backward()
    offload, count = TransferEngine.offload, [0]

    def fails_once(engine: TransferEngine, tensor: Tensor) -> Tensor:
        count[0] += 1
        if count[0] == 3:
            raise StoreError("no room")
        return offload(engine, tensor)

    with monkeypatch.context() as patched:
        patched.setattr(TransferEngine, "offload", fails_once)
        with pytest.raises(StoreError, match="no room"):
            optimizer.step()
    with pytest.raises(OverspillError, match="others are not"):
        optimizer.step()
    with pytest.raises(OverspillError, match="others are not"):
        loss_of(compiled, 3)
    go_back()
    step(2)
    assert all(map(torch.equal, model.parameters(), expected))


class Broken(nn.Module):
    """A model of three graphs, with a parameter that two have, and two that code before and between them reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(4), net(3)
        self.second[0].weight = self.first[0].weight
        self.gain = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.offset = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = moved(x, self.offset)
        ramp = torch.arange(WIDTH) * 0.1 + torch.ones(WIDTH)
        torch._dynamo.graph_break()  # behind a graph without inputs
        x = self.first(x + ramp)
        torch._dynamo.graph_break()
        y: Tensor = self.second(Scaled.apply(x, self.gain))
        return y


@torch.compiler.disable
def moved(x: Tensor, offset: Tensor) -> Tensor:
    return x + offset.square()  # which saves it


class Scaled(torch.autograd.Function):
    @staticmethod
    @torch.compiler.disable
    def forward(ctx: Any, x: Tensor, gain: Tensor) -> Tensor:
        ctx.save_for_backward(x, gain)
        return x * gain

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, gain = ctx.saved_tensors
        return gradients[0] * gain, (gradients[0] * x).sum(0)


@pytest.mark.long
def test_several_graphs_and_calls_of_a_step() -> None:
    def loop(run: Run) -> None:
        torch.manual_seed(0)
        model = Broken()
        compiled = run.begin(model, (adamw, list(model.parameters())))
        for i in range(8):
            pair = compiled(batch(i)), compiled(batch(i + 9))
            loss = (pair[0] * pair[1]).square().mean()
            loss.backward()
            run.see(loss)
            if i in {1, 2, 3}:  # gradients are summed
                continue
            run.see(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            run.optimizers[0].step()
            run.moves()
            run.optimizers[0].zero_grad()

    ours = compare(loop, "75%")
    assert len(ours.session.plans) == 3


@pytest.mark.long
def test_another_model_of_the_session_is_first_called_between_forward_and_backward() -> None:
    def loop(run: Run) -> None:
        model, reference = net(), net(4)
        run.model, run.optimizers = model, [adamw(model.parameters())]
        calls: list[Callable[..., Any]] = [model, reference]
        if run.budget is not None:
            run.session = overspill.Session(budget=run.budget, store=run.store)
            calls = [overspill.compile(one, session=run.session) for one in calls]
        for i in range(3):
            found = calls[0](batch(i))
            with torch.no_grad():
                expected = calls[1](batch(i))
            loss = (found - expected).square().mean()
            loss.backward()
            run.optimizers[0].step()
            run.moves()
            run.optimizers[0].zero_grad()
            run.see(loss)

    compare(loop, "55%")


@pytest.mark.long
def test_layers_that_have_one_forward_keep_their_own_weights() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = torch.relu(self.other(torch.relu(self.one(x))))
            return y

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        @torch._dynamo.disable(recursive=False)
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    def loop(run: Run) -> None:
        model = Layers()
        compiled = run.begin(model, (adamw, list(model.parameters())))
        for i in range(3):
            loss = loss_of(compiled, i)
            loss.backward()
            run.optimizers[0].step()
            run.moves()
            run.optimizers[0].zero_grad()
            run.see(loss)

    compare(loop, "150KiB")


@pytest.mark.short("closed")
@pytest.mark.parametrize("ends", ["closed", "refused"])
def test_weights_and_state_that_are_gone_go_though_dynamo_keeps_the_programs(ends: str) -> None:
    def used() -> list[weakref.ref[Any]]:
        run = Run("45%", "host")
        model, compiled, optimizer = begin(run)
        for seed in range(2):
            loss_of(compiled, seed).backward()
            optimizer.step()
        run.moves()
        if ends == "closed":
            run.session.close()
        else:
            with pytest.raises(InfeasibleBudgetError):
                compiled(batch(0).repeat(100, 1))
        state = [weakref.ref(t) for state in optimizer.state.values() for t in state.values() if t.dim()]
        return [*state, *map(weakref.ref, model.parameters()), weakref.ref(run.session), weakref.ref(optimizer)]

    refs = used()
    gc.collect()
    assert len(refs) > 2
    assert [ref() for ref in refs if ref() is not None] == []


def test_what_is_compiled_already_is_not_compiled_again() -> None:
    model = net()
    compiled = overspill.compile(model, budget="8MiB", store="host")
    for again in (compiled, overspill.compile(model.forward, budget="8MiB", store="host")):
        with pytest.raises(RequestError, match="compiled by Overspill"):
            overspill.compile(again, budget="4MiB", store="host")
    with pytest.raises(RequestError, match="no module"):
        overspill.compile("gpt2", budget="4MiB")  # type: ignore[type-var]
