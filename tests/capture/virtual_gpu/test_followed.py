"""Values that follow from a script's own: they are those of plain PyTorch, or not known; never stale."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.values.invented import Invented
from overspill.capture.virtual_gpu.values.real_values import values_of

Step = Callable[[list[Tensor], int], Tensor | None]


def write_to_a_part(found: list[Tensor], n: int) -> None:
    found[n][n % 3 :: 2] = n


def write_where(found: list[Tensor], n: int) -> None:
    found[n][found[n] > n] = found[n].sum()


def add_to_a_view(found: list[Tensor], n: int) -> None:
    found[n].flatten().view(-1)[: n + 1].add_(found[n].max())


def copy_over(found: list[Tensor], n: int) -> None:
    found[n].copy_(torch.arange(found[n].numel()).view(found[n].shape))


def move_up(found: list[Tensor], n: int) -> None:
    torch._foreach_add_([found[n], found[n - 1]], n)


KNOWN: list[Step] = [
    write_to_a_part, write_where, add_to_a_view, copy_over, move_up,
    lambda found, n: found[n].t() if found[n].dim() == 2 else found[n].unsqueeze(0),
    lambda found, n: found[n].nonzero().flatten(),
    lambda found, n: torch.cat([found[n].flatten(), found[n - 1].flatten()]),
    lambda found, n: found[n].flatten()[found[n].flatten() % 2 == 0],
    lambda found, n: torch.unique(found[n]),
    lambda found, n: torch.bincount(found[n].flatten().abs() % 5),
    lambda found, n: found[n].masked_fill_(found[n] > 7, n),
    lambda found, n: found[n].zero_(),
    lambda found, n: found[n].float().cumsum(0).long(),
    lambda found, n: found[n].cpu().to(found[n].device, copy=True),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def _gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with VirtualGpu(invented=getattr(request, "param", Invented)()):
        yield


def done(steps: list[tuple[Step, int]], device: str, drawn: Tensor) -> Iterator[list[Tensor]]:
    """The tensors that a program of `steps` has, after each."""

    def draw(found: list[Tensor], n: int) -> None:
        found[n].add_(drawn if device == "cpu" else torch.randint(9, (1,), device=device))

    found = [torch.arange(6, device=device), torch.tensor([[3, 1], [0, 2]]).to(device)]
    for step, n in steps:
        chosen = n % len(found)
        if found[chosen].numel():
            made = (draw if step is UNKNOWN else step)(found, chosen)
            found += [] if made is None else [made]
        yield found


def UNKNOWN(found: list[Tensor], n: int) -> None:
    """Add what nobody knows: see `done`."""


@pytest.mark.parametrize("_gpu", [Invented, lambda: None], ids=["script", "model"], indirect=True)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(KNOWN), st.integers(0, 30)), max_size=12))
def test_what_is_known_is_followed_through_views_and_writes_in_place(steps: list[tuple[Step, int]]) -> None:
    for real, fake in zip(done(steps, "cpu", torch.ones(1)), done(steps, "cuda", torch.ones(1)), strict=True):
        assert [tensor.tolist() for tensor in fake] == [tensor.tolist() for tensor in real]


@pytest.mark.parametrize("_gpu", [Invented, lambda: None], ids=["script", "model"], indirect=True)
@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([*KNOWN[:6], *[UNKNOWN] * 3]), st.integers(0, 30)), max_size=12))
def test_what_was_written_by_what_nobody_knows_is_not_known(steps: list[tuple[Step, int]]) -> None:
    drawn = torch.full((1,), 1000)
    for real, fake in zip(done(steps, "cpu", drawn), done(steps, "cuda", drawn), strict=True):
        for value, tensor in zip(real, fake, strict=True):
            known = values_of(tensor)
            assert known is None or known.tolist() == value.tolist()
        assert any(step is UNKNOWN for step, _ in steps) or all(values_of(tensor) is not None for tensor in fake)


def test_of_boxes_that_may_overlap_all_are_left_on_the_device() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    left = torch.ops.torchvision.nms(torch.rand(130, 4, device="cuda"), torch.rand(130, device="cuda"), 0.5)
    assert left.is_cuda
    assert (left.shape, left.dtype) == ((130,), torch.int64)


def test_masks_and_edges_from_arrays_have_their_shapes() -> None:
    edges = torch.from_numpy(np.array([[0, 1, 2, 2], [1, 2, 0, 2]])).cuda()
    adjacency = torch.zeros(2000, 2000, device="cuda")
    adjacency[edges[0], edges[1]] = 1
    assert adjacency.nonzero().shape == (4, 2)
    assert edges[:, edges[0] != edges[1]].shape == (2, 3)
    train = torch.zeros(2000, dtype=torch.bool, device="cuda")
    train[:140] = True
    features = torch.randn(2000, 8, device="cuda")
    assert features[train].shape == (140, 8)
    assert features[~train & (torch.arange(2000, device="cuda") < 200)].shape == (60, 8)
    assert torch.repeat_interleave(features, torch.tensor([2] * 2000).cuda(), dim=0).shape == (4000, 8)
    assert f"{train.sum()} {edges.max() + 1}" == "140 3"


def test_what_a_model_makes_and_what_is_empty_is_not_known() -> None:
    known = torch.arange(4.0, device="cuda")
    made = torch.nn.Linear(4, 4).cuda()(known)
    for unknown in (made, made > 0, torch.empty(4, device="cuda"), known.new_empty(4), torch.empty_like(known)):
        assert values_of(unknown) is None
    known += made.detach()
    assert values_of(known) is None
    known.fill_(2)
    assert known.tolist() == [2] * 4


@pytest.mark.parametrize("_gpu", [Invented, lambda: None], ids=["script", "model"], indirect=True)
def test_a_host_tensor_has_the_values_that_were_written_into_it_until_one_is_unknown() -> None:
    rows = torch.zeros(2, 4, dtype=torch.int64)
    rows[0, :3] = torch.arange(3, device="cuda")
    rows[1, 0] = torch.tensor(5)
    assert rows.tolist() == [[0, 1, 2, 0], [5, 0, 0, 0]]
    rows[1] = torch.randint(9, (4,), device="cuda")
    rows.add_(1)
    for unknown in (rows, rows[0], rows + 1, torch.stack([rows, rows]), rows.cuda()):
        assert values_of(unknown) is None
    rows.fill_(2)
    assert rows.tolist() == rows.cuda().tolist() == [[2] * 4] * 2


def test_there_are_no_more_different_positions_than_places() -> None:
    scores = torch.randn(64, 10, device="cuda")
    classes = scores.argmax(1)
    assert torch.unique(classes.view(8, 8).flatten()).shape == (10,)
    assert torch.unique(scores.max(dim=1).indices[:4]).shape == (4,)
    assert torch.unique(scores.topk(3).indices).shape == (10,)
    assert torch.unique(scores.argmax()).shape == (1,)
    assert torch.bincount(classes * 10 + classes, minlength=100).shape == (100,)
    assert torch.allclose(scores, scores + 1)
    assert not torch.equal(scores, scores + 1)


def test_lengths_that_went_to_the_device_and_back_pack_a_batch() -> None:
    lengths = torch.tensor([3, 5, 2]).cuda()
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.zeros(5, 3, 4, device="cuda"), lengths.cpu(), enforce_sorted=False
    )
    assert packed.data.shape == (10, 4)


def test_counts_follow_arithmetic_where_they_are_invented() -> None:
    labels = torch.randint(9, (3000,), device="cuda")
    classes = labels.max().item() + 1
    assert torch.nn.Linear(4, 3 * classes).out_features == 6
    assert str(classes) == "unknown"
    assert torch.empty(10 - classes // 1, device="cuda").shape == (8,)
