"""Counts of what PyTorch's allocator hands out."""

import torch

from overspill.capture.programs.allocations import allocations, peak_of


def test_blocks_come_and_go() -> None:
    with allocations() as found:
        with found.part():
            kept = torch.empty(1000)
        gone = torch.empty(3000)
        del gone
        with found.part():
            more = torch.empty(500)
    assert found.by_part == [[4000], [2000]]
    assert found.between_parts == [[], [12_000, -12_000]]
    assert found.blocks == [0, 1, 1, 3]
    assert peak_of(found.changes) == (16_000, 6000)
    assert kept.numel() + more.numel() == 1500


def test_garbage_of_an_earlier_count_does_not_go_in_this_one() -> None:
    with allocations() as before:
        kept = [torch.empty(1000)]
    with allocations() as found:
        kept.clear()
    assert before.changes == [4000]
    assert found.changes == []


def test_blocks_that_lie_where_an_earlier_count_saw_some_do_not_go_in_this_one() -> None:
    with allocations():
        kept = [torch.empty(1000 * i + 5000) for i in range(50)]
    kept.clear()  # unseen
    kept = [torch.empty(1000 * i + 5000) for i in range(50)]  # most likely at the same addresses
    with allocations() as found:
        kept.clear()
    assert found.changes == []
