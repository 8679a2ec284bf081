"""FLOPs of attention whose heads share keys and values are those of attention that has them for each head."""

import pytest
import torch
from torch.utils.flop_counter import flop_registry

from overspill.capture.flops import flops_of

aten = torch.ops.aten


@pytest.mark.parametrize("backward", [False, True])
def test_shared_heads_count_as_heads_of_their_own(backward: bool) -> None:
    query, shared = torch.empty(2, 8, 16, 4, device="meta"), torch.empty(2, 2, 16, 4, device="meta")
    whole = torch.empty_like(query)
    op, before = aten._scaled_dot_product_flash_attention, []
    if backward:
        op, before = aten._scaled_dot_product_flash_attention_backward, [query]
    found = flops_of(op, [*before, query, shared, shared], {}, None)
    assert found == flop_registry[op](*before, query, whole, whole, out_val=None) > 0
