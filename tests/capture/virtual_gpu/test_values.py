"""What was not computed decides nothing: the error names the user's line. What the host knows stays known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from overspill.capture.virtual_gpu.record import record
from overspill.capture.virtual_gpu.values.frames import user_line
from overspill.capture.virtual_gpu.values.unknown import UnknownNumber, data_dependent
from overspill.core.errors import UnsupportedError

F = torch.nn.functional


def run(program: Callable[[], Any]) -> None:
    record(lambda _: program())


def x(*shape: int) -> Tensor:
    return torch.randn(shape or (3,), device="cuda")


def whole(*shape: int) -> Tensor:
    return torch.randint(3, shape or (3,), device="cuda")


def take_a_branch() -> None:
    if x().sum() > 0:
        pass


def compare_an_item() -> None:
    best = 1.0
    if x().sum().item() < best:
        pass


def stop_early() -> None:
    losses = [x().mean().item() for _ in range(3)]
    min(losses)


def loop_while() -> None:
    while x().norm() > 1:
        pass


def test_checks_that_only_raise_pass() -> None:
    def check(_: Any) -> None:
        assert (x() >= 0).all()
        if not (x() < x() + 1).all():
            raise ValueError
        if x().sum().item() > 1:
            raise ValueError
        torch._check_tensor_all(x() >= 0)

    record(check)


DECISIONS: dict[str, Callable[[], Any]] = {
    "a branch": take_a_branch,
    "a comparison of an item": compare_an_item,
    "the least of several items": stop_early,
    "a loop": loop_while,
    "a whole number": lambda: int(x().sum()),
    "a whole number of an item": lambda: int(x().sum().item()),
    "a range": lambda: range(whole(1).sum().item()),
    "an index into a list": lambda: [1, 2, 3][whole().argmax()],
    "an index from an item": lambda: [1, 2, 3][whole().argmax().item()],
    "a key": lambda: {1: "a"}.get(whole().sum().item() == 1),
    "membership": lambda: 1.0 in x(),
    "positions": lambda: x().nonzero(),
    "positions as a tuple": lambda: torch.where(x() > 0),
    "a selection": lambda: x().masked_select(x() > 0),
    "a selection by truth": lambda: x()[x() > 0],
    "a list": lambda: x().tolist(),
    "a list from the host": lambda: x().cpu().tolist(),
    "an array": lambda: x().cpu().numpy(),
    "an array of a detached tensor": lambda: x().requires_grad_().detach().cpu().numpy(),
    "an array by numpy": lambda: np.asarray(x().cpu()),
    "distinct values": lambda: torch.unique(whole()),
    "counts": lambda: torch.bincount(whole()),
    "repetitions": lambda: torch.repeat_interleave(x(), whole()),
    "equality": lambda: torch.equal(x(), x()),
    "closeness": lambda: torch.allclose(x(), x() + 1),
    "an item of many": lambda: x(3).item(),
    "a complex item": lambda: torch.randn((), dtype=torch.complex64, device="cuda").item(),
}


@pytest.mark.parametrize("case", DECISIONS)
def test_a_decision_on_a_value_is_an_error_at_the_users_line(case: str) -> None:
    program = DECISIONS[case]
    with pytest.raises(UnsupportedError) as error:
        run(program)
    text = str(error.value)
    line = program.__code__.co_firstlineno
    assert f"{__file__}:" in text
    assert line <= int(text.split(f"{__file__}:", 1)[1].partition(",")[0]) <= line + 5
    assert "`" in text
    assert "estimate" in text


def test_the_error_says_what_would_work() -> None:
    with pytest.raises(UnsupportedError, match=r"in take_a_branch: .*shapes"):
        run(take_a_branch)


def test_the_line_is_the_users_however_deep_the_tensor_is_used() -> None:
    class Odd(nn.Module):
        def forward(self, value: Tensor) -> Tensor:
            return value if value.max() > 1 else -value  # here

    with pytest.raises(UnsupportedError, match=r"test_values\.py:\d+, in forward: .*#"):
        run(lambda: nn.Sequential(nn.Identity(), Odd())(x()))


def test_values_may_be_logged() -> None:
    def program() -> None:
        loss = x().square().mean()
        total, correct = 0.0, 0
        total += loss.item()
        correct += (x(4, 2).argmax(1) == whole(4)).sum().item()
        for text in (
            str(loss.item()), f"{loss.item():.4f}", "%.3f" % loss.item(), f"{total / 3:>8.3f}", f"{loss:.3f}", str(loss),  # noqa: UP031
            f"{100 * correct / 4}", f"{round(loss.item(), 2)}", f"{-loss.item()}", repr(loss), f"{loss.detach().cpu().item()}",
        ):  # fmt: skip
            assert text
        assert f"{total}" == "unknown"
        assert math.isfinite(loss.item())
        assert math.exp(loss.item()) > 0
        assert np.mean([loss.item(), 2.0]) == 1.25
        assert isinstance(float(loss), float)
        assert isinstance(loss.item(), float)

    run(program)


def test_unknown_numbers_stay_unknown_in_sums_and_products() -> None:
    one = UnknownNumber()
    for other in (2, 2.5, one):
        for operation in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.mod):
            assert isinstance(operation(one, other), UnknownNumber)
            if operation is not operator.mod:
                assert isinstance(operation(other, one), UnknownNumber)
    assert isinstance(abs(-one), UnknownNumber)
    assert isinstance(sum([one, one]), UnknownNumber)
    for decision in (bool, int, lambda n: n > 1, lambda n: n == 1, lambda n: [0, 1][n], lambda n: max(n, 2)):
        with pytest.raises(UnsupportedError):
            decision(one)


def test_tests_for_trouble_find_none() -> None:
    def program() -> None:
        loss = x().sum()
        assert not torch.isnan(loss)
        assert not torch.isinf(x()).any()
        assert torch.isfinite(x()).all()
        with torch.autograd.detect_anomaly():
            nn.Linear(3, 3).cuda()(x(2, 3)).sum().backward()
        F.gaussian_nll_loss(x(3), x(3), torch.ones(3, device="cuda"))
        torch.distributions.Normal(x(3), torch.ones(3, device="cuda")).log_prob(x(3))

    with pytest.warns(UserWarning, match="Anomaly"):
        run(program)


def test_a_square_mask_of_a_transformer_is_taken_for_the_causal_one() -> None:
    def program() -> None:
        model = nn.Transformer(16, 4, 1, 1, 32, batch_first=True).cuda()
        mask = model.generate_square_subsequent_mask(3).cuda()
        model(x(2, 5, 16), x(2, 3, 16), tgt_mask=mask).sum().backward()

    run(program)


def test_padded_batches_run_through_a_transformers_fast_path() -> None:
    def program() -> None:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).cuda().eval()
        with torch.no_grad():
            out = model(x(2, 5, 16), src_key_padding_mask=torch.zeros(2, 5, dtype=torch.bool, device="cuda"))
        assert out.shape == (2, 5, 16)

    run(program)


def test_the_hosts_values_stay_readable() -> None:
    def program() -> None:
        host = torch.arange(5)
        assert host.tolist() == [0, 1, 2, 3, 4]
        assert host.sum().item() == 10
        assert int(host[2]) == 2
        assert (host > 2).nonzero().shape == (2, 1)
        assert host[host > 2].tolist() == [3, 4]
        assert host.numpy()[1] == 1
        assert host.unique().numel() == 5
        assert torch.tensor(3.5).item() == 3.5
        assert f"{torch.tensor(3.5):.2f}" == "3.50"
        assert host.cuda().shape == (5,)
        assert len(list(range(torch.tensor(3)))) == 3
        torch.manual_seed(0)
        order = torch.randperm(5)
        torch.manual_seed(0)
        assert torch.equal(order, torch.randperm(5))
        if host.sum() < 3:
            raise AssertionError

    run(program)


def test_numbers_that_the_program_put_on_the_device_itself_are_known() -> None:
    def program() -> None:
        count = torch.tensor(3, device="cuda")
        assert list(range(count)) == [0, 1, 2]
        assert count.item() == 3
        assert (count + 1).item() == 4
        assert x(5)[:count].shape == (3,)

    run(program)


def test_a_line_outside_of_any_file_is_the_program() -> None:
    assert user_line(None) == "the program"
    assert "test_values.py" in str(data_dependent())
