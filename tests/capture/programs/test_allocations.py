"""Counts of what PyTorch's allocator hands out."""

import gc

import torch

from overspill.capture.programs.allocations import allocations


def test_garbage_of_an_earlier_count_does_not_go_in_this_one() -> None:
    with allocations() as before:
        cycle: list[object] = [torch.empty(1000)]
        cycle.append(cycle)
    del cycle
    with allocations() as found:
        kept = [[] for _ in range(10 * gc.get_threshold()[0])]  # for which garbage would be collected
    assert before.changes == [4000]
    assert found.changes == []
    assert kept
    assert gc.isenabled()
