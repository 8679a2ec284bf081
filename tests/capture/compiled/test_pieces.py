"""Row-wise chains in pieces of rows: the same bits, less memory, and nothing where there is no such chain."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from overspill.capture.compiled import pieces
from overspill.capture.compiled.backward import Backward
from overspill.capture.compiled.joint import JointGraph
from overspill.capture.compiled.known_values import KnownValues
from overspill.capture.compiled.pieces import LOSS, in_pieces
from overspill.capture.compiled.step_joint import joint_of_step
from overspill.runtime.reachable import same_bits

aten = torch.ops.aten
Step = Callable[..., Tensor]


def joint_of(step: Step, *values: Tensor) -> JointGraph:
    with KnownValues() as mode:
        fakes = [mode.from_tensor(v.detach()).requires_grad_(v.is_floating_point()) for v in values]
    backward = Backward([f"v{i}" for i in range(len(values))], several=False)
    return joint_of_step(step, nn.Module(), fakes, backward)


def run(joint: JointGraph, *values: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found = fx.Interpreter(joint.module).run(*values)
    return [v for v in tree_leaves(found) if isinstance(v, Tensor)]


def largest(joint: JointGraph) -> int:
    return max(n.meta["val"].nbytes for n in (*joint.forward, *joint.backward) if pieces._nbytes(n) and joint.is_op(n))


def count(joint: JointGraph, target: object) -> int:
    return sum(n.target is target for n in (*joint.forward, *joint.backward))


def check(step: Step, *values: Tensor) -> tuple[JointGraph, JointGraph | None]:
    """The step as traced and in pieces; loss and gradients of both and of plain PyTorch are the same to the last bit."""
    leaves = [v.detach().requires_grad_(v.is_floating_point()) for v in values]
    loss = step(*leaves)
    loss.backward()
    expected = [loss.detach(), *(v.grad for v in leaves if v.grad is not None)]
    whole = joint_of(step, *values)
    divided = in_pieces(whole)
    for joint in (whole, divided):
        if joint is not None:
            found = run(joint, *values)
            assert len(found) == len(expected)
            assert all(same_bits(*pair) for pair in zip(found, expected, strict=True))
    return whole, divided


def scores(rows: int, words: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(rows * words)
    given = torch.randn(rows, words, generator=drawn, dtype=torch.float32).to(dtype) * 3
    return given, torch.randint(0, words, (rows,), generator=drawn)


@contextmanager
def always() -> Iterator[None]:
    """Split chains however small they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "WORTH", 1 << 40)
        patch.setattr(pieces, "ALIGNED_BYTES", 1)
        yield


def from_bfloat16(given: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(given.float(), targets)


def test_a_loss_in_pieces_makes_nothing_as_large_as_the_scores_in_float32() -> None:
    given, targets = scores(512, 300, torch.bfloat16)
    whole, divided = check(from_bfloat16, given, targets)
    assert divided is not None
    assert largest(whole) == 2 * given.nbytes
    assert largest(divided) == given.nbytes
    assert count(divided, LOSS) == 1
    assert count(divided, aten.nll_loss_backward.default) > 8


@pytest.mark.short("dtype0-mean-sizes0", "dtype2-none-sizes2")
@pytest.mark.parametrize(
    ("dtype", "reduction", "sizes"),
    [
        (torch.float32, "mean", ((2, 3, -100), (1001, 17, 0))),
        (torch.bfloat16, "sum", ((33, 1000, 0), (4097, 5, -100))),
        (torch.float64, "none", ((33, 1000, -100),)),
    ],
)
def test_the_loss_over_picked_scores_has_the_same_bits(
    dtype: torch.dtype, reduction: str, sizes: tuple[tuple[int, int, int], ...]
) -> None:
    with always():
        for rows, words, ignored in sizes:
            given, targets = scores(rows, words, dtype)
            targets[:: 1 + rows // 3] = ignored

            def step(given: Tensor, targets: Tensor, ignored: int = ignored) -> Tensor:
                return F.cross_entropy(given.float(), targets, ignore_index=ignored, reduction=reduction).sum()

            _, divided = check(step, given, targets)
            assert divided is not None


@pytest.mark.parametrize("function", [F.log_softmax, F.softmax])
def test_a_row_of_softmax_has_the_same_bits_wherever_it_lies(function: Callable[..., Tensor]) -> None:
    for words in (1, 3, 8, 17, 64, 1000, 1025, 50257):
        for dtype in (torch.float32, torch.bfloat16):
            given, _ = scores(37, words, dtype)
            upper = torch.randn_like(given)
            leaf = given.requires_grad_()
            whole = function(leaf, -1)
            (gradient,) = torch.autograd.grad(whole, leaf, upper)
            for start, stop in ((0, 1), (1, 2), (5, 36), (36, 37)):
                part = given[start:stop].clone().requires_grad_()
                made = function(part, -1)
                assert same_bits(made, whole[start:stop])
                assert same_bits(torch.autograd.grad(made, part, upper[start:stop])[0], gradient[start:stop])


def weighted(given: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(given.float(), targets, weight=torch.arange(1.0, 301.0))


def smoothed(given: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(given.float(), targets, label_smoothing=0.1)


def with_z_loss(given: Tensor, targets: Tensor) -> Tensor:
    raised = given.float()
    return F.cross_entropy(raised, targets) + 1e-3 * raised.logsumexp(-1).square().mean()


def scaled_and_masked(given: Tensor, targets: Tensor) -> Tensor:
    chosen = (targets != 5).unsqueeze(-1)
    return F.cross_entropy(torch.where(chosen, given.float() / 0.7, 0.0) * torch.linspace(1, 2, 300), targets)


def by_hand(given: Tensor, targets: Tensor) -> Tensor:
    shaped = given.view(2, -1, 300)
    return -F.log_softmax(shaped.float(), -1).gather(-1, targets.view(2, -1, 1)).mean()


def shifted(given: Tensor, targets: Tensor) -> Tensor:
    shaped, shapes = given.view(2, -1, 300), targets.view(2, -1)
    return F.cross_entropy(shaped[:, :-1].reshape(-1, 300).float(), shapes[:, 1:].reshape(-1))


def over_columns(given: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(given.float().t().contiguous(), targets[:300] % given.shape[0])


@pytest.mark.short("shifted", "by_hand")
@pytest.mark.parametrize("step", [weighted, smoothed, by_hand, shifted, over_columns])
def test_other_readers_and_other_losses_keep_their_bits(step: Step) -> None:
    with always():
        check(step, *scores(510, 300, torch.bfloat16))


@pytest.mark.long
def test_scores_that_are_masked_and_scaled_are_split_with_their_loss() -> None:
    given, targets = scores(512, 300, torch.bfloat16)
    _, divided = check(scaled_and_masked, given, targets)
    assert divided is not None
    assert largest(divided) == given.nbytes


@pytest.mark.long
def test_a_result_that_others_read_is_made_whole_and_the_chain_goes_on_behind_it() -> None:
    given, targets = scores(512, 300, torch.bfloat16)
    _, divided = check(with_z_loss, given, targets)
    assert divided is not None
    assert count(divided, aten._to_copy.default) < 8  # the scores in float32, once
    assert count(divided, aten._log_softmax.default) > 8


@pytest.mark.short("301")
@pytest.mark.parametrize("words", [300, 301, 302])
def test_rows_are_aligned_in_pieces_as_in_the_whole(words: int) -> None:
    _, divided = check(from_bfloat16, *scores(520, words, torch.bfloat16))
    assert divided is not None
    slices = divided.module.graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    starts = [n.args[2] * words * torch.bfloat16.itemsize for n in slices if n.meta["val"].shape[-1] == words]
    assert any(starts)
    assert all(start % 16 == 0 for start in starts)


def test_nothing_is_split_where_no_chain_is_large() -> None:
    def step(given: Tensor, large: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(given @ (large @ large), targets)

    given, targets = scores(24, 300)
    assert in_pieces(joint_of(step, given, torch.randn(300, 300), targets)) is None
    assert in_pieces(joint_of(lambda w: (w @ w).sum(), torch.randn(9, 9))) is None


def test_the_traced_graph_stays_as_it_is() -> None:
    whole = joint_of(from_bfloat16, *scores(512, 300, torch.bfloat16))
    before = str(whole.module.graph)
    assert in_pieces(whole) is not None
    assert str(whole.module.graph) == before


OPS: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda x, _: x.float(), lambda x, _: x.bfloat16(), lambda x, _: x * 0.3, lambda x, _: x + 1, lambda x, _: -x,
    lambda x, row: x * row, lambda x, row: x + row, lambda x, _: x * torch.linspace(0, 1, x.shape[-1], dtype=x.dtype),
    lambda x, _: F.log_softmax(x, -1), lambda x, _: F.softmax(x, -1), lambda x, _: x.relu(), lambda x, _: x.tanh(),
    lambda x, _: x.clamp(-1, 1), lambda x, _: x.view(-1, x.shape[-1]), lambda x, _: x.view(3, -1, x.shape[-1]),
    lambda x, row: torch.where(x > row, x, 0.5), lambda x, _: x.masked_fill(x > 1, 0.0), lambda x, _: x - x.mean(-1, keepdim=True),
    lambda x, _: x.abs() / 2, lambda x, _: x.sigmoid(), lambda x, _: F.layer_norm(x, x.shape[-1:]), lambda x, _: F.gelu(x),
)  # fmt: skip


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=9), st.integers(1, 9), st.integers(1, 40), st.data())
def test_random_chains_keep_their_bits(chosen: list[int], third: int, words: int, data: st.DataObject) -> None:
    read_again = data.draw(st.integers(0, len(chosen)))

    def step(given: Tensor, targets: Tensor) -> Tensor:
        x, row, extra = given, targets.float().view(-1, 1), 0.0
        for position, number in enumerate(chosen):
            if position == read_again:
                extra = x.float().square().sum() * 1e-3
            x = OPS[number](x, row.to(x.dtype).view(*x.shape[:-1], 1))
        return F.cross_entropy(x.reshape(-1, words), targets) + extra

    given, targets = scores(3 * third, words)
    with always():
        check(step, given, targets)
