"""A forked child reads a step of its parent, or hears why not, and harms nobody."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch
from tests.runtime.step.observers import READS, expected, in_child, same, small, values
from torch import Tensor, nn

import overspill
from overspill.core.errors import OverspillError, RequestError
from overspill.runtime.reachable import same_bits


@pytest.mark.short("state_dict", "optimizer")
@pytest.mark.parametrize("read", READS)
def test_a_child_reads_what_host_memory_has_and_its_parent_goes_on(read: str) -> None:
    pair = small("host")

    def child() -> bytes:
        found = values(pair, read)
        with pytest.raises(RequestError, match=r"forked child.*spawn"):
            pair.step(*pair.inputs)
        pair.step.close()
        del pair.step
        gc.collect()
        return pickle.dumps(found)

    answer = in_child(child)
    assert answer is not None
    assert same(pickle.loads(answer), expected(pair, read))
    pair.train(2)
    pair.assert_same()


def test_a_child_cannot_read_its_parents_file_and_what_it_does_harms_nobody() -> None:
    pair = small("disk")

    def child() -> bytes:
        with pytest.raises(OverspillError, match=r"forked from.*synchronize\(\)"):
            values(pair)
        del pair.step
        gc.collect()
        with pytest.raises(OverspillError, match="forked from"):
            values(pair)
        return b"told"

    assert in_child(child) == b"told"
    pair.train(2)
    pair.assert_same()
    pair.step.synchronize()
    answer = in_child(lambda: pickle.dumps(values(pair)))
    assert answer is not None
    assert same(pickle.loads(answer), expected(pair))


@pytest.mark.short("host")
@pytest.mark.parametrize("store", ["host", "disk"])
def test_a_compiled_model_in_a_child_works_or_says_why_not(store: str) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    compiled = overspill.compile(model, budget="1GiB", policy="vdnn-all", store=store)
    x = torch.randn(256, 64)

    def gradients() -> list[Tensor]:
        model.zero_grad()
        compiled(x).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    wanted = gradients()

    def child() -> bytes:
        if store == "host":
            with torch.no_grad():
                loss = compiled(x).sum()
            return pickle.dumps(float(loss))
        with pytest.raises(OverspillError, match="forked from"):
            compiled(x).sum()
        return b"told"

    assert in_child(child) is not None
    assert all(map(same_bits, gradients(), wanted))
    torch._dynamo.reset()
