"""Training on the virtual GPU: autograd, hooks and checkpoints, and every optimizer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.capture.virtual_gpu.virtual import F, batch, mlp, optim, train
from tests.turns import by_turns
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record


def test_gradients_are_off_where_they_are_off(gpu: VirtualGpu) -> None:
    model = mlp().cuda().eval()
    with torch.no_grad():
        assert not model(batch()).requires_grad
    with torch.inference_mode():
        out = model(batch())
        assert out.is_cuda
        assert out.is_inference()
    assert model(batch()).requires_grad


def test_inference_mode_runs_the_same_ops_as_no_grad() -> None:
    def ops(mode: Callable[[], Any]) -> list[str]:
        def program(_: Any) -> None:
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).cuda()
            recurrent = nn.LSTM(16, 8).cuda()
            with mode():
                recurrent(F.dropout(layer(torch.randn(2, 5, 16, device="cuda")).softmax(-1), 0.1))

        views = {"view", "t", "transpose", "_unsafe_view", "unsqueeze", "squeeze", "expand", "select", "detach"}
        return [op.name for op in record(program).ops if op.name not in views]

    assert ops(torch.inference_mode) == ops(torch.no_grad)


def test_functions_of_the_programs_own(gpu: VirtualGpu) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            assert x.is_cuda
            return 2 * x * grad

    x = torch.randn(3, device="cuda", requires_grad=True)
    Square.apply(x).sum().backward()
    assert x.grad.is_cuda


def test_hooks_see_the_device(gpu: VirtualGpu) -> None:
    model, seen = mlp().cuda(), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.is_cuda))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.is_cuda))
    model[2].register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].is_cuda))
    model[2].register_forward_hook(lambda _, __, out: seen.append(out.is_cuda))
    model(batch()).sum().backward()
    assert seen == [True] * 4


def test_second_derivatives(gpu: VirtualGpu) -> None:
    x, model = torch.randn(2, 8, device="cuda", requires_grad=True), mlp().cuda()
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    (slope.norm(2) - 1).pow(2).backward()
    assert model[0].weight.grad.is_cuda


def test_gradients_are_accumulated_zeroed_and_dropped(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    parameters = gpu.recorder.live_bytes
    for _ in range(3):
        (model(batch()) / 3).sum().backward()
        assert gpu.recorder.live_bytes == 2 * parameters
    model.zero_grad(set_to_none=False)
    assert gpu.recorder.live_bytes == 2 * parameters
    for parameter in model.parameters():
        parameter.grad = None
    assert gpu.recorder.live_bytes == parameters


def test_frozen_weights_with_adapters_have_no_gradients_and_no_state(gpu: VirtualGpu) -> None:
    base = nn.Linear(64, 64, bias=False).cuda().requires_grad_(False)
    down, up = nn.Parameter(torch.zeros(64, 2, device="cuda")), nn.Parameter(torch.zeros(2, 64, device="cuda"))
    optimizer, x = optim.AdamW([down, up]), torch.randn(4, 64, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        (base(x) + x @ down @ up).sum().backward()
        optimizer.step()
    assert base.weight.grad is None
    scalars = 2 * 4
    assert gpu.recorder.live_bytes - scalars <= 4 * (64 * 64 + 4 * 64 + 4 * (2 * 128)) <= gpu.recorder.live_bytes


def test_checkpoints_hooks_and_savings_on_the_host(gpu: VirtualGpu) -> None:
    model, x = mlp().cuda(), batch().requires_grad_()
    for reentrant in (False, True):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(x).sum()
    loss.backward()
    assert x.grad.is_cuda


def test_functional_calls_and_vectorized_maps(gpu: VirtualGpu) -> None:
    model, x = mlp().cuda(), batch()
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row,)).sum()

    assert torch.func.grad(loss)(weights, x)["0.weight"].is_cuda
    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    assert rows["0.weight"].shape == (4, 16, 8)
    assert torch.vmap(lambda row: (row * 2).sum())(x).is_cuda


def test_views_written_in_place(gpu: VirtualGpu) -> None:
    x = torch.randn(4, 6, device="cuda", requires_grad=True)
    y = x * 1
    y[:2].mul_(2)
    y[0, 0] = 1
    y[:, 1:3] += 1
    y.view(-1)[3:5].zero_()
    y.sum().backward()
    assert x.grad.shape == (4, 6)


# --- Optimizers -------------------------------------------------------------------------------------------------------

NAMES = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "NAdam",
    "RAdam",
    "Adamax",
    "ASGD",
    "Rprop",
    "Adafactor",
)
FLAGS: dict[str, dict[str, Any]] = {
    "default": {}, "foreach": {"foreach": True}, "one by one": {"foreach": False}, "capturable": {"capturable": True},
    "fused": {"fused": True}, "maximize": {"maximize": True}, "a rate on the device": {"lr": None},
}  # fmt: skip


@pytest.mark.parametrize(("name", "flags"), by_turns(NAMES, FLAGS))
def test_every_optimizer_takes_its_steps(gpu: VirtualGpu, name: str, flags: str) -> None:
    model, options = mlp().cuda(), dict(FLAGS[flags])
    if "lr" in options:
        options = {"lr": torch.tensor(0.01, device="cuda"), "foreach": False}
    warnings.simplefilter("ignore")  # torch's own advice about some of these flags
    try:
        optimizer = getattr(optim, name)(model.parameters(), **options)
        train(model, optimizer)
    except (TypeError, RuntimeError, ValueError) as error:
        assert any(word in str(error) for word in ("unexpected keyword", "fused", "not supported", "Tensor"))  # noqa: PT017
        return
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    assert all(value.is_cuda for value in state if value.dim())


def test_optimizers_take_the_foreach_path_as_they_do_on_cuda() -> None:
    def ops(**options: Any) -> set[str]:
        def program(_: Any) -> None:
            model = mlp().cuda()
            train(model, optim.Adam(model.parameters(), **options))

        return {op.name for op in record(program).ops if op.phase == "update"}

    assert any(name.startswith("_foreach") for name in ops())
    assert not any(name.startswith("_foreach") for name in ops(foreach=False))
    assert "_fused_adam_" in ops(fused=True)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_to_its_last_iteration(gpu: VirtualGpu, search: str | None) -> None:
    model, calls = mlp().cuda(), []
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) >= 4
    assert len(optimizer.state[model[0].weight]["old_dirs"]) == 3


def test_schedulers_averages_and_saved_states(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), optim.lr_scheduler.StepLR(optimizer, 2)]
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    average = optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        loss = model(batch()).sum()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        for schedule in schedules:
            schedule.step()
        plateau.step(loss.item())
    assert optimizer.param_groups[0]["lr"] < 0.1
    other = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    train(model, other)


def test_gradients_are_clipped(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    model(batch()).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_cuda
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False, error_if_nonfinite=True)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)
