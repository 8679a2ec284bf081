"""Models that `fully_shard` has sharded, trained by a planned step: FSDP's losses, weights and state, on each rank."""

from typing import Any

import pytest
import torch

from .test_parallel import of, run_once
from .test_parallel import ranks as ranks  # noqa: PLC0414 - the fixture

FOUR = ("sharded", "sharded, roomy", "sharded, accumulated", "sharded, accumulated half", "sharded, all half")


@pytest.fixture(scope="module")
def more(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks found, of whose numbers a sum depends on the order."""
    return run_once(tmp_path_factory, "four_ranks", FOUR, ranks=4)


@pytest.mark.parametrize("case", ["sharded", "sharded, accumulated half"])
def test_each_rank_gets_the_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_fsdp(ranks, case)


@pytest.mark.long
@pytest.mark.parametrize("case", FOUR)
def test_each_of_four_ranks_gets_the_bits_of_fsdp(more: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_fsdp(more, case)


def assert_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    found = of(ranks, case)
    for ours, fsdp in found:
        assert ours.keys() == fsdp.keys()
        assert [name for name in ours if not torch.equal(ours[name], fsdp[name])] == []
    assert not torch.equal(found[0][0]["losses"], found[1][0]["losses"])


def test_the_smallest_budget_is_in_force_on_all_and_the_peak_is_what_is_measured(ranks: list[dict[str, Any]]) -> None:
    for budget, planned, measured, verbs, evaluates in of(ranks, "budgets"):
        assert budget == 270_000
        assert 0.98 * planned <= measured <= planned <= budget
        assert {"recompute", "offload"} <= verbs
        assert evaluates
