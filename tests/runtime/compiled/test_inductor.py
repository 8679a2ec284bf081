"""Inductor's own kernels within a budget: the bits of stock torch.compile, and the peak that was planned."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor, fx, nn
from torch.optim import Optimizer

import overspill
from overspill.capture.compiled.joint import copied
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.core.errors import RequestError, UnsupportedError
from overspill.models import optimizer_named
from overspill.runtime.options import Options
from overspill.runtime.reachable import same_bits

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


class Net(nn.Module):
    def __init__(self, body: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(torch.relu(self.first(x)))
        return self.last(hidden if self.body is None else self.body(hidden))


def trained(call: Callable[[Tensor], Tensor], model: nn.Module, optimizer: Optimizer, sizes: list[int]) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(0)
    torch.manual_seed(1)
    for size in sizes:
        optimizer.zero_grad()
        call(torch.randn(size, 16, generator=drawn)).square().mean().backward()
        optimizer.step()
    return [v.detach().clone() for v in model.state_dict().values()]


def pair(
    managed: Callable[[nn.Module, Optimizer], Callable[[Tensor], Tensor]], sizes: list[int], **how: object
) -> None:
    """The same weights as stock torch.compile gives."""
    found = []
    for compile_ in (lambda model, _: torch.compile(model, dynamic=False), managed):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(**how)  # type: ignore[arg-type]
        optimizer = optimizer_named("momentum")(model.parameters())
        found.append(trained(compile_(model, optimizer), model, optimizer, sizes))
    assert all(map(same_bits, *found))


def planned(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    return overspill.compile(
        model, budget="smallest", optimizer=optimizer, backend="inductor", store="host", partition=1.0
    )


@pytest.mark.long
def test_a_loss_outside_batch_norm_and_another_batch_size() -> None:
    pair(planned, [32, 32, 12, 32])


@pytest.mark.long
def test_as_a_backend_of_torch_compile() -> None:
    options = {"budget": "1MiB", "backend": "inductor", "store": "host"}
    pair(lambda model, _: torch.compile(model, backend="overspill", options=options, dynamic=False), [32, 32])


@pytest.mark.long
def test_evaluation_runs_between_steps() -> None:
    torch.manual_seed(0)
    model = Net()
    compiled = planned(model, torch.optim.SGD(model.parameters(), 0.1))
    x = torch.randn(32, 16)
    compiled(x).sum().backward()
    model.eval()
    with torch.no_grad():
        assert torch.allclose(compiled(x), model(x), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("as_it_is", [False, True])
def test_backward_twice_with_retain_graph(as_it_is: bool) -> None:
    model = Net()
    with nullcontext() if as_it_is else torch._functorch.config.patch(donated_buffer=False):
        loss = planned(model, torch.optim.SGD(model.parameters(), 0.1))(torch.randn(32, 16)).sum()
    if as_it_is:  # as torch.compile itself refuses it
        with pytest.raises(UnsupportedError, match="donated_buffer = False"):
            loss.backward(retain_graph=True)
    else:
        loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss.backward()
    assert as_it_is or all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), once, strict=True))


def test_options_that_do_not_go_together_are_refused_in_a_line() -> None:
    with pytest.raises(RequestError, match="eager backend"):
        Options(profile=True, backend="inductor")
    with pytest.raises(RequestError, match="backend='inductor'"):
        Options(partition=1.0)
    with pytest.raises(RequestError, match="goes from 0 to 1"):
        Options(backend="inductor", partition=2.0)


def rotary(x: Tensor) -> Tensor:
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones(32), torch.arange(32.0))
    return torch.view_as_real(turned).flatten(-2)


def around_a_graph_without_ops(x: Tensor) -> Tensor:
    x = x.sin()
    torch._dynamo.graph_break()
    x = x.to(torch.float32)  # as it is already
    torch._dynamo.graph_break()
    return x


def behind_a_graph_without_inputs(x: Tensor) -> Tensor:
    torch._dynamo.graph_break()
    scale = torch.arange(64.0).sin()
    torch._dynamo.graph_break()
    return x * scale


def solved(x: Tensor) -> Tensor:
    chosen = torch.multinomial(x.detach().softmax(-1), 64, replacement=True)
    return x * chosen + torch.linalg.solve(x.T @ x + torch.eye(64), x.T).T


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:this step calls a model 3 times")
@pytest.mark.parametrize("body", [rotary, behind_a_graph_without_inputs, around_a_graph_without_ops, solved])
def test_what_a_program_leaves_to_libraries(body: Callable[[Tensor], Tensor]) -> None:
    pair(planned, [32, 32], body=body)


class Product(torch.autograd.Function):
    """A product whose gradients are in float32, which autocast would compute in bfloat16."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradient.float() @ weight.t(), x.t() @ gradient.float()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_backward_is_outside_of_autocast(backend: str) -> None:
    plain = {"eager": lambda model: model, "inductor": torch.compile}[backend]
    outside = torch._functorch.config.patch(backward_pass_autocast="off")
    gradients = []
    for compile_ in (plain, partial(overspill.compile, budget="1GiB", backend=backend)):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net(lambda x: Product.apply(x.float(), torch.eye(64) * 0.3))
        compiled = compile_(model)
        with torch.autocast("cpu", torch.bfloat16), outside if compile_ is torch.compile else nullcontext():
            made = compiled(torch.randn(4, 16))
        made.float().sin().sum().backward()
        gradients.append(model.first.weight.grad)
    assert same_bits(*gradients)


@pytest.mark.long
def test_a_result_that_is_detached_beside_itself_leaves_its_views_their_gradient() -> None:
    """Stock torch.compile loses it, here without a word."""
    model = nn.Linear(4, 4).double()

    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        y = model(x).sin()
        return y.detach(), y[:, 1:]

    found = []
    for call in (views, overspill.compile(views, budget="1GiB", backend="inductor")):
        model.zero_grad()
        y, part = call(torch.ones(3, 4).double())
        (y.mean() * part.square().sum()).backward()
        found.append(model.weight.grad)
    torch.testing.assert_close(*found)


@pytest.mark.long
def test_a_library_call_that_stock_torch_compile_cannot_run_is_refused_in_a_line() -> None:  # oneDNN's LSTM, trained
    rnn = nn.LSTM(16, 16)
    step = overspill.train_step(
        rnn, lambda rnn, x: rnn(x)[0].sum(), torch.optim.SGD(rnn.parameters()), budget="1GiB", backend="inductor"
    )
    with pytest.raises(UnsupportedError, match=r"mkldnn_rnn_layer.*cannot be"):
        step(torch.randn(4, 1, 16))


@pytest.mark.long
@pytest.mark.parametrize("partition", [1.0, pytest.param(0.0, marks=pytest.mark.long)])
def test_a_partition_that_is_asked_for_is_the_one(partition: float) -> None:
    call = overspill.compile(Net(), budget="smallest", backend="inductor", store="host", partition=partition)
    call(torch.randn(32, 16)).sum().backward()
    assert call.overspill.partitions == [partition]


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        pytest.param({"cpp_wrapper": True}, "no Python program", marks=pytest.mark.long),
        ({"cpp.cxx": ("no-such-compiler",)}, "cannot compile"),
    ],
)
def test_what_inductor_cannot_do_runs_on_the_eager_backend_if_that_is_wanted(
    setting: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model, x = Net(), torch.randn(32, 16)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch._inductor.config.patch(setting):
        with pytest.raises(UnsupportedError, match=said):
            planned(model, optimizer)(x)
        call = overspill.compile(model, budget="1MiB", backend="inductor", on_unplanned="warn", store="host")
        with pytest.warns(UserWarning, match=f"{said}.*eager backend"):
            loss = call(x).sum()
    assert same_bits(loss, model(x).sum())
    (plan,) = call.overspill.plans
    assert plan.peak_bytes <= plan.budget_bytes
    assert call.overspill.partitions == [None]


def test_a_copied_graph_still_says_where_its_inputs_come_from() -> None:  # by which partitioners know parameters
    seen = []

    def backend(module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        again = copied(module)
        for one in (module, again):
            inputs = one.graph.find_nodes(op="placeholder")
            seen.append((one.meta, one._param_name_to_source, [getattr(n, "_dynamo_source", None) for n in inputs]))
        return again.forward

    model = Net()
    x = torch.randn(4, 16)
    assert torch.equal(torch.compile(model, backend=backend)(x), model(x))
    assert seen[0] == seen[1]
    assert any(seen[0][2])


SECOND = """
import torch, overspill
from torch._dynamo.utils import counters

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
overspill.compile(model, budget="1MiB", backend="inductor", store="host")(torch.randn(16, 8)).sum().backward()
print({k: v for k, v in counters["inductor"].items() if k.startswith("fxgraph_cache")})
"""


@pytest.mark.long
def test_a_second_process_finds_everything_compiled(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = partial(
        subprocess.run, [sys.executable, "-c", SECOND], env=environment, text=True, capture_output=True, check=True
    )
    assert run().stdout == "{'fxgraph_cache_miss': 2}\n"
    assert run().stdout == "{'fxgraph_cache_hit': 2}\n"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:this step keeps what several models need", "ignore:a profiler runs")
def test_two_models_and_their_smallest_budget() -> None:
    def gan(session: overspill.Session | None) -> tuple[list[float], int]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        nets = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32)), nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))  # fmt: skip
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
        make, critic = (
            torch.compile(net, dynamic=False) if session is None else overspill.compile(net, session=session)
            for net in nets
        )  # fmt: skip
        real, noise = torch.randn(512, 32), torch.randn(512, 16)
        losses, live = [], real.nbytes + noise.nbytes + sum(4 * p.nbytes for net in nets for p in net.parameters())

        def step() -> None:
            fake = make(noise)
            for optimizer, inputs in zip(optimizers[::-1], ((real, fake.detach()), (fake,)), strict=True):
                optimizer.zero_grad()
                loss = torch.stack([critic(x).sigmoid().mean() for x in inputs]).sum()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())

        for _ in range(3):
            step()
        with allocations() as found:
            step()
        return losses, live + peak_of(found.changes)[0]

    session = overspill.Session(budget="smallest", backend="inductor", partition=1)
    losses, peak = gan(session)
    assert losses == gan(None)[0]
    assert peak <= max(plan.budget_bytes for plan in session.plans)


@pytest.mark.long
def test_a_hook_that_comes_later_and_the_smallest_budget() -> None:
    model = Net()
    call = overspill.compile(model, budget="smallest", backend="inductor", partition=1)
    batch = torch.randn(32, 16)
    call(batch).sum().backward()
    model.register_forward_hook(lambda _module, _inputs, output: output.sin() * 2)
    call(batch).sum().backward()
    first, second = call.overspill.plans[0], call.overspill.plans[-1]
    assert second.peak_bytes <= second.budget_bytes
    assert second is not first


# --- Planned addresses ------------------------------------------------------------------------------------------------


def in_arena(model: nn.Module, optimizer: Optimizer, budget: str = "smallest") -> Callable[[Tensor], Tensor]:
    return overspill.compile(
        model, budget=budget, optimizer=optimizer, backend="inductor", store="host", placement="planned", partition=1.0
    )


@pytest.mark.long
def test_buffers_at_planned_addresses_have_the_same_bits() -> None:
    pair(in_arena, [32, 32])


def test_a_graph_break_and_planned_addresses_are_refused_in_a_line() -> None:
    def broken(x: Tensor) -> Tensor:
        middle = model(x)
        torch._dynamo.graph_break()
        return middle.sin()

    model = Net()
    call = overspill.compile(broken, budget="1MiB", backend="inductor", placement="planned")
    with pytest.raises(UnsupportedError, match="fullgraph=True"):
        call(torch.randn(32, 16))


class Losses(nn.Module):
    """The loss of a small net, whose activations outweigh its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 128))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:this step calls a model 2 times", "ignore:a profiler runs")
def test_calls_that_wait_for_their_backward_have_an_arena_each_within_the_budget() -> None:
    batch, part, budget = torch.randn(512, 32), torch.randn(200, 32), 1_100_000
    model = Losses()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    call = overspill.compile(model, budget=budget, backend="inductor", placement="planned", partition=1)

    def step(*inputs: Tensor) -> None:
        optimizer.zero_grad()
        torch.stack([call(x) for x in inputs]).sum().backward()
        optimizer.step()

    def evaluate() -> None:
        with torch.no_grad():
            call(batch)

    live = sum(p.nbytes for p in model.parameters()) + batch.nbytes + part.nbytes
    peaks, kept = [], None
    turns = [lambda: step(batch), *[lambda: step(batch, part)] * 3, evaluate, lambda: step(part), lambda: step(batch)]
    with allocations() as found:
        for turn in turns:
            with found.part():
                turn()
        kept = call(batch)  # no backward of it follows
        with found.part():
            step(batch)
    for before, changes in zip(found.between_parts, found.by_part, strict=True):
        peak, after = peak_of(changes)
        live += sum(before)
        peaks.append(live + peak)
        live += after
    assert kept.requires_grad
    del peaks[1], peaks[-1]  # which are warned of
    # A batch of another shape is the program's own: the plan of the first call does not know what it is.
    assert max(peaks) <= budget + part.nbytes


@pytest.mark.long
def test_a_backward_that_writes_over_what_it_read_does_not_run_twice() -> None:
    model = Net()
    loss = in_arena(model, torch.optim.SGD(model.parameters(), 0.1))(torch.randn(32, 16)).sum()
    with pytest.raises(UnsupportedError, match="retain_graph=True"):
        loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.long
def test_deterministic_algorithms_with_an_embedding_whose_gradient_is_put_by_index() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.body((x[:, 0] * 50).long().abs() % 50)

    torch.use_deterministic_algorithms(True)
    try:
        found = []
        for compile_ in (lambda model, _: torch.compile(model, dynamic=False), planned):
            torch._dynamo.reset()
            torch.manual_seed(0)
            model = Words()
            optimizer = optimizer_named("momentum")(model.parameters())
            found.append(trained(compile_(model, optimizer), model, optimizer, [32, 32]))
        assert all(map(same_bits, *found))
    finally:
        torch.use_deterministic_algorithms(False)
