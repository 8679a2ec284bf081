"""A budget is parsed once, and is bytes as soon as the step is known."""

from __future__ import annotations

import pytest

from overspill.core.budget import Budget
from overspill.core.errors import RequestError


@pytest.mark.parametrize(
    ("asked", "nbytes"),
    [("8GiB", 8 << 30), ("8GB", 8 * 10**9), (1 << 20, 1 << 20), ("0.5", 500), (0.25, 250), ("75%", 750), (" 50 % ", 500), (None, 77), ("smallest", 33)],
)  # fmt: skip
def test_it_is_a_size_a_share_of_what_is_taken_unmanaged_or_the_device(asked: str | float | None, nbytes: int) -> None:
    budget = Budget.parse(asked)
    assert budget.bytes_of(lambda: 1000, 77, lambda: 33) == nbytes
    assert Budget.parse(budget) is budget


def test_what_is_taken_unmanaged_is_asked_for_a_share_only() -> None:
    def never() -> int:
        raise AssertionError

    assert Budget.parse("1KiB").bytes_of(never, 1, never) == 1024
    assert Budget.parse(None).bytes_of(never, 1, never) == 1
    assert Budget.parse("smallest").bytes_of(never, 1, lambda: 2) == 2


@pytest.mark.parametrize("asked", ["0", "0.0", "0%", "-1GiB", -1, "8 gigs", "1.5", "", 8, "45"])
def test_what_is_no_positive_size_is_refused(asked: str | int) -> None:
    with pytest.raises(RequestError) as caught:
        Budget.parse(asked)
    said, _, instead = str(caught.value).partition("; write ")
    assert said.startswith(f"'{asked}' is ")
    assert instead


@pytest.mark.parametrize("asked", ["150%", "100.1 %"])
def test_a_share_of_more_than_all_is_refused(asked: str) -> None:
    with pytest.raises(RequestError, match="100% at most"):
        Budget.parse(asked)
    assert Budget.parse("100%").share == 1.0


def test_a_share_of_so_little_that_nothing_is_left_is_refused() -> None:
    with pytest.raises(RequestError, match="no positive size"):
        Budget.parse("0.1").bytes_of(lambda: 3, 77, lambda: 3)
