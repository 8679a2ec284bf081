"""Plain loops at budgets below weights, gradients and optimizer state have the bits of plain PyTorch."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

import overspill
from overspill.core.errors import InfeasibleBudgetError, OverspillError, RequestError, StoreError
from overspill.runtime.compiled.named_backend import session_with
from overspill.runtime.transfer.engine import TransferEngine

pytestmark = [pytest.mark.usefixtures("forget_compiled_code"), pytest.mark.filterwarnings("ignore")]
WIDTH = 64
Make = Callable[[Iterable[Any]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}
adamw = OPTIMIZERS["adamw"]


@dataclass
class Run:
    """One run of a loop, plain or compiled."""

    budget: str | None
    store: str
    how: str = "compile"
    seen: list[Any] = field(default_factory=list)
    session: Any = None
    model: nn.Module = field(default_factory=nn.Module)
    optimizers: list[Optimizer] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)

    def begin(self, model: nn.Module, *make: tuple[Make, list[Any]]) -> Callable[..., Any]:
        """Return the model as the loop calls it, with optimizers over the parameters given with each."""
        self.model = model
        self.optimizers = [one(parameters) for one, parameters in make]
        if self.budget is None:
            return model
        if self.how == "by name":
            self.options = {"budget": self.budget, "store": self.store}
            return torch.compile(model, backend="overspill", options=self.options, dynamic=False)  # type: ignore[return-value]
        compiled = overspill.compile(model, budget=self.budget, store=self.store)
        self.session = compiled.overspill
        return compiled

    def see(self, *values: Any) -> None:
        """Compare these with the other run."""
        self.seen += [value.detach().clone() if isinstance(value, Tensor) else value for value in values]

    def moves(self) -> None:
        """Check that a plan moves parameters."""
        if self.how == "by name" and self.budget is not None:
            self.session = session_with(self.options)
        if self.session is not None:
            state = self.session.loop.state
            assert state is not None
            assert state.in_force

    def end(self) -> list[Any]:
        """Return all that was seen, with weights, buffers, gradients and optimizer state."""
        for parameter in self.model.parameters():
            self.see(parameter, parameter.grad)
        self.see(*self.model.buffers())
        for optimizer in self.optimizers:
            for state in optimizer.state.values():
                self.see(*(state[key] for key in sorted(state)))
        return self.seen


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def compare(loop: Callable[[Run], None], budget: str = "45%", store: str = "host", how: str = "compile") -> Run:
    """Run `loop` plain and compiled, and compare all that it saw."""
    plain, ours = Run(None, store, how), Run(budget, store, how)
    loop(plain)
    expected = plain.end()
    loop(ours)
    found = ours.end()
    assert len(expected) == len(found)
    assert [i for i, pair in enumerate(zip(expected, found, strict=True)) if not same(*pair)] == []
    for plan in [] if ours.session is None else ours.session.plans:
        assert plan.peak_bytes <= plan.budget_bytes
    return ours


def net(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())))


def batch(seed: int, rows: int = 4) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def begin(run: Run, make: Make = adamw) -> tuple[nn.Sequential, Callable[..., Any], Optimizer]:
    model = net()
    compiled = run.begin(model, (make, list(model.parameters())))
    return model, compiled, run.optimizers[0]


def loss_of(compiled: Callable[..., Any], seed: int) -> Tensor:
    value: Tensor = compiled(batch(seed)).square().mean()
    return value


either_way = pytest.mark.parametrize("how", ["compile", pytest.param("by name", marks=pytest.mark.long)])


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


def test_a_setting_that_turns_state_on_or_off_changes_between_steps() -> None:
    def loop(run: Run) -> None:
        _, compiled, optimizer = begin(run)
        for i in range(5):
            optimizer.param_groups[0]["weight_decay"] = 0.1 * (i % 2)
            loss = loss_of(compiled, i)
            loss.backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            run.see(loss)

    compare(loop)


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


@pytest.mark.parametrize("zeros", ["before", pytest.param("between", marks=pytest.mark.long), "never"])
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


def test_weights_and_state_are_read_and_written_between_steps() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        mean = [p.detach().clone() for p in model.parameters()]
        for i in range(6):
            run.see(loss_of(compiled, i).backward())
            with torch.no_grad():
                run.see(sum(p.norm() for p in model.parameters()))
            optimizer.step()
            run.moves()
            with torch.no_grad():
                for p, m in zip(model.parameters(), mean, strict=True):
                    if i == 1:
                        p.data.mul_(0.5)
                    if i == 2:
                        p.add_(0.01)
                    m.lerp_(p, 0.1)
            if i == 3:
                model[0].weight.data = torch.full((WIDTH, WIDTH), 0.02)
            if i == 4:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
            optimizer.zero_grad()
        run.see(*mean)

    compare(loop)


def test_weights_that_share_a_larger_memory_get_another_plan() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            compiled(batch(i, 4 if i < 3 else 5)).square().mean().backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            if i == 1:
                found = nn.utils.parameters_to_vector(model.parameters()).detach()
                nn.utils.vector_to_parameters(found * 0.9, model.parameters())

    compare(loop)


class Levels(torch.optim.Optimizer):
    """Steps by one of a few levels, in a table that it keeps for all parameters."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.table = torch.linspace(-1, 1, 256)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.1)
                p.sub_(self.table[(mean.clamp(-1, 1) * 127 + 128).long()], alpha=group["lr"])


def test_an_optimizer_that_keeps_a_table_of_its_own() -> None:
    def loop(run: Run) -> None:
        _, compiled, optimizer = begin(run, Levels)
        for i in range(4):
            loss_of(compiled, i).backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "60%")


def test_a_weight_that_is_away_takes_the_values_of_another_that_is_away() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(3):
            loss_of(compiled, i).backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for one, other in zip(model[::4], model[2::4], strict=True):
                    one.weight.copy_(other.weight)  # type: ignore[operator, union-attr]
            run.moves()

    compare(loop)


@pytest.mark.parametrize("how", ["copies", "reads", "asks", "leaves"])
def test_what_the_loops_own_code_leaves_beyond_the_budget_is_told_once(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """As SAM does, which copies all weights into the optimizer's state between two calls of the model."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = overspill.compile(model, budget="150KiB", store="host")
    for _ in range(4):
        compiled(torch.ones(4, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters() if how in ("copies", "reads") else ():
            values = parameter.detach().clone()
            if how == "copies":
                optimizer.state[parameter]["old"] = values
        if how == "asks":
            compiled.overspill.synchronize()
    told = [r.getMessage() for r in caplog.records if "own code" in r.getMessage()]
    assert len(told) == (how == "copies")
    assert all("old 97.5 KiB" in text for text in told)


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


def test_a_view_of_a_weight_is_kept_from_some_step_on() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        row = torch.zeros(())
        for i in range(5):
            loss_of(compiled, i).backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            if i == 1:
                row = model[2].weight.detach()[3]
            row.mul_(0.5)
            run.see(row)

    compare(loop, "60%")


@either_way
def test_state_dicts_and_copies_in_the_middle(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        saved = io.BytesIO()
        for i in range(5):
            loss_of(compiled, i).backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()
            if i == 1:
                torch.save((model.state_dict(), optimizer.state_dict()), saved)
            if i == 2:
                weights, state = torch.load(io.BytesIO(saved.getvalue()))
                run.see(*weights.values())
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            if i == 3:
                other, its = copy.deepcopy((model, optimizer))
                loss_of(other, 9).backward()
                its.step()
                run.see(*other.parameters())

    compare(loop, "45%", "disk", how=how)


def test_by_name_models_of_one_class_with_equal_options_each_move_their_own() -> None:
    def loop(run: Run) -> None:
        pairs = [begin(run) for _ in range(2)]
        for i in range(6):
            model, compiled, optimizer = pairs[i % 2]
            loss_of(compiled, i).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.see(*model.parameters())
        run.moves()

    compare(loop, how="by name")


@either_way
def test_freezing_and_unfreezing(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(6):
            if i in (2, 4):
                model[0].requires_grad_(i == 4)
            loss_of(compiled, i).backward()
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "60%", how=how)


def test_the_session_brings_all_back_and_ends_and_the_loop_goes_on() -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run)
        for i in range(5):
            if run.session is not None and i == 1:
                run.session.synchronize()
            loss_of(compiled, i).backward()
            if i == 2:
                with contextlib.nullcontext() if run.session is None else run.session.paused():
                    model[0].weight.data.mul_(0.9)
            if run.session is not None and i == 3:
                run.session.close()
                compiled = model
            run.see(*(p.grad for p in model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    compare(loop)


@either_way
def test_parameters_get_another_dtype(how: str) -> None:
    def loop(run: Run) -> None:
        model, compiled, optimizer = begin(run, OPTIMIZERS["sgd"])
        for i in range(5):
            if i == 2:
                model.double()
                optimizer = OPTIMIZERS["sgd"](model.parameters())
                run.optimizers = [optimizer]
            run.see(compiled(batch(i).to(model[0].weight.dtype)).square().mean().backward())
            optimizer.step()
            run.moves()
            optimizer.zero_grad()

    compare(loop, "60%", how=how)


def test_a_parameter_that_gets_another_dtype_before_its_update_is_refused_in_words_of_the_loop() -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = overspill.compile(model, budget="130KiB", store="host")
    for i in range(2):
        compiled(torch.ones(4, 64)).sum().backward()
        if i:
            model[0].weight.data = model[0].weight.data.double()
            with pytest.raises(RequestError, match=r"next call$"):
                optimizer.step()
        else:
            optimizer.step()
            optimizer.zero_grad()


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
