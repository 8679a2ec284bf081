"""Fake results lie as the kernels' do, whatever the order of the dimensions of what they read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import overspill
from overspill.capture.compiled.strides import REAL, strides_of_kernels

aten = torch.ops.aten


def orders(*sizes: int) -> Iterator[Tensor]:
    """Tensors of these sizes that lie in several orders, or in memory with gaps."""
    last = len(sizes) - 1
    for one, two in ((0, 0), (last, last - 1), (0, 1), (1, last)):
        swapped = list(sizes)
        swapped[one], swapped[two] = sizes[two], sizes[one]
        yield torch.rand(swapped).transpose(one, two)
    yield torch.rand(*sizes, 2)[..., 0]
    if len(sizes) > 3:
        yield torch.rand(sizes).to(memory_format=torch.channels_last if len(sizes) == 4 else torch.channels_last_3d)


def of_two(x: Tensor, y: Tensor) -> Iterator[tuple[Any, ...]]:
    """Calls of ops of two operands, and of one beside a number."""
    yield from ((op, 0.7, x) for op in (aten.pow.Scalar, aten.float_power.Scalar))
    yield from ((op, x, y) for op in (aten.copysign.Tensor, aten.special_xlog1py.default, aten.xlogy.Tensor))
    for op in (aten.hardsigmoid_backward, aten.hardswish_backward, aten.logit_backward):
        yield op.default, x, y
    yield from ((aten.div.Tensor_mode, *pair) for pair in ((x, y), (7, 2)))
    yield aten.elu_backward.default, x, 1.0, 1.0, 1.0, False, y
    yield aten.hardtanh_backward.default, x, y, 0.0, 1.0
    yield aten.softplus_backward.default, x, y, 1.0, 20.0
    yield aten.binary_cross_entropy_backward.default, torch.ones(()), x, y
    for trains in (False, True):
        yield aten.rrelu_with_noise_backward.default, x, y, y, 0.1, 0.3, trains, False
        yield aten.rrelu_with_noise_backward.default, y, y, x, 0.1, 0.3, trains, False


def of_loss(op: Any, *more: Any) -> Iterator[tuple[Any, ...]]:
    for x in orders(3, 4, 5):
        yield from ((op, torch.ones(()), x, other, *more) for other in orders(3, 4, 5))


def of_batch(op: Any, *sizes: int) -> Iterator[tuple[Any, ...]]:
    for x in orders(*sizes):
        four = [torch.rand(sizes[1]) for _ in range(4)]
        if op is aten.native_batch_norm_backward.default:
            yield from ((op, g, x, four[0], *four, False, 1e-5, [True] * 3) for g in orders(*sizes))
        else:
            training = () if "no_training" in str(op) else (True,)
            yield op, x, *four[: 2 if "no_stats" in str(op) else 4], *training, 0.1, 1e-5


def of_padded(forward: Any, backward: Any, sizes: tuple[int, ...]) -> Iterator[tuple[Any, ...]]:
    for x in orders(*sizes):
        padding = [1] * 2 * (len(sizes) - 2)
        yield from ((op, x, padding) for op in (forward,) if op is not None)
        yield from ((backward, g, x, padding) for g in orders(*sizes[:2], *(n + 2 for n in sizes[2:])))


def calls() -> Iterator[tuple[Any, ...]]:
    for x in orders(3, 4, 5):
        yield aten.log_sigmoid_forward.default, x
        for y in orders(3, 4, 5):
            yield aten._log_softmax_backward_data.default, x, y, 1, torch.float32
            yield aten.native_dropout_backward.default, x, y > 0.5, 2.0
            yield from of_two(x, y)
    yield from of_loss(aten.mse_loss_backward.default, 1)
    yield from of_loss(aten.smooth_l1_loss_backward.default, 1, 1.0)
    yield from of_loss(aten.huber_loss_backward.default, 1, 1.0)
    for op in REAL:
        if "batch_norm" in str(op):
            for sizes in ((6, 4), (3, 4, 5), (2, 4, 3, 5), (2, 4, 3, 5, 2)):
                yield from of_batch(op, *sizes)
    for x in orders(2, 4, 3, 5):
        yield aten.channel_shuffle.default, x, 2
        yield aten.max_unpool2d.default, x, torch.zeros(x.shape, dtype=torch.long), [6, 10]
    yield from of_padded(None, aten.reflection_pad2d_backward.default, (2, 4, 3, 5))
    yield from of_padded(None, aten.replication_pad2d_backward.default, (2, 4, 3, 5))
    for kind in ("reflection", "replication"):
        ops = (getattr(aten, f"{kind}_pad3d").default, getattr(aten, f"{kind}_pad3d_backward").default)
        yield from of_padded(*ops, (2, 4, 3, 5, 2))


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=pytest.mark.long) if i % 3 else op for i, op in enumerate(REAL)], ids=str
)
def test_fake_results_lie_as_those_of_the_kernel(op: Any) -> None:
    made = [args for name, *args in calls() if name is op]
    assert made
    keywords = {"rounding_mode": "floor"} if op is aten.div.Tensor_mode else {}
    real = [op(*args, **keywords) for args in made]
    with strides_of_kernels(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [op(*tree_map_only(Tensor, mode.from_tensor, args), **keywords) for args in made]
    for args, ones, twos in zip(made, real, fake, strict=True):
        for one, two in zip(tree_leaves(ones), tree_leaves(twos), strict=True):
            if one.numel():
                assert one.stride() == two.stride(), (args, one.stride(), two.stride())


class Transposed(nn.Module):
    """Batch norm over features that lie last, as in models of time series, and a reshape behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.into(x).transpose(1, 2)).transpose(1, 2)
        return self.out(y.reshape(-1, 64)).transpose(0, 1)


@pytest.mark.parametrize("whole_step", [False, True])
def test_a_reshape_behind_a_transposed_batch_norm_copies_as_in_eager(whole_step: bool) -> None:
    torch._dynamo.reset()

    def loss(model: Callable[..., Tensor], x: Tensor, wanted: Tensor) -> Tensor:
        return F.mse_loss(model(x), wanted)

    torch.manual_seed(0)
    plain, ours = Transposed(), Transposed()
    ours.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in (plain, ours)]
    compiled = overspill.compile(ours, budget="smallest")
    step = overspill.train_step(ours, loss, optimizers[1], budget="smallest")
    for _ in range(2):
        batch = torch.randn(3, 8, 6), torch.randn(5, 6)
        losses = [loss(plain, *batch), step(*batch) if whole_step else loss(compiled, *batch)]
        for value, optimizer in zip(losses, optimizers, strict=True):
            if value.requires_grad:
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert torch.equal(*(value.detach() for value in losses))
    assert all(map(torch.equal, plain.state_dict().values(), ours.state_dict().values()))
