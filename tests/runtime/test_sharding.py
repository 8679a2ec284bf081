"""Models that `fully_shard` has sharded, trained by a planned step: FSDP's losses, weights and state, on each rank."""

from typing import Any

import pytest
import torch

from .test_parallel import of
from .test_parallel import ranks as ranks  # noqa: PLC0414 - the fixture


@pytest.mark.parametrize("case", ["sharded", "sharded, roomy"])
def test_each_rank_gets_the_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    assert_bits_of_fsdp(ranks, case)


def assert_bits_of_fsdp(ranks: list[dict[str, Any]], case: str) -> None:
    found = of(ranks, case)
    for ours, fsdp in found:
        assert ours.keys() == fsdp.keys()
        assert [name for name in ours if not torch.equal(ours[name], fsdp[name])] == []
    assert not torch.equal(found[0][0]["losses"], found[1][0]["losses"])
