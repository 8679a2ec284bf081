"""The shapes that are not asked of torch are those that torch would have given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill import models
from overspill.capture.fake_cuda import fake, shapes
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.estimation.programs import program_of
from overspill.job import Job

aten = torch.ops.aten
TORCH = FakeTensorMode(allow_non_fake_inputs=True)


def described(result: Any) -> list[Any]:
    outputs = result if isinstance(result, (list, tuple)) else [result]
    return [None if t is None else (tuple(t.shape), t.stride(), t.dtype) for t in outputs]


def same(op: Any, *args: Any) -> bool:
    """Whether our answer, if we have one, is torch's; False where we have none."""
    with TORCH:
        fakes = [TORCH.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        foretold = shapes.SHAPES[op](*fakes)
        if foretold is None:
            return False
        ours = [None if s is None else (s, shapes.contiguous_stride(s), torch.float32) for s in foretold]
        assert ours == described(op(*fakes))
    return True


sizes = st.integers(1, 9)


@settings(max_examples=150, deadline=None)
@given(
    batch=st.integers(1, 4), groups=st.integers(1, 3), inside=st.integers(1, 3), outside=st.integers(1, 3),
    image=st.lists(sizes, min_size=1, max_size=3), kernel=st.integers(1, 3), stride=st.integers(1, 3),
    padding=st.integers(0, 2), dilation=st.integers(1, 2), biased=st.booleans(), last=st.booleans(),
)  # fmt: skip
def test_convolutions(
    batch: int, groups: int, inside: int, outside: int, image: list[int], kernel: int, stride: int, padding: int,
    dilation: int, biased: bool, last: bool,
) -> None:  # fmt: skip
    n = len(image)
    if any(side + 2 * padding < dilation * (kernel - 1) + 1 for side in image):
        return
    x = torch.empty(batch, inside * groups, *image)
    if last and n == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    w = torch.empty(outside * groups, inside, *[kernel] * n)
    bias = torch.empty(outside * groups) if biased else None
    rest = ([stride] * n, [padding] * n, [dilation] * n, False, [0] * n, groups)
    same(aten.convolution.default, x, w, bias, *rest)
    y = aten.convolution.default(x.to("meta"), w.to("meta"), None, *rest)
    grad = torch.empty(y.shape)
    same(
        aten.convolution_backward.default,
        grad,
        x,
        w,
        [outside * groups] if biased else [0],
        *rest,
        [True, True, biased],
    )


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=2, max_size=4), st.booleans(), st.booleans())
def test_batch_norm_and_relu(shape: list[int], last: bool, affine: bool) -> None:
    x = torch.empty(shape)
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    channel = torch.empty(shape[1])
    weight = channel if affine else None
    same(aten.native_batch_norm.default, x, weight, weight, channel, channel, True, 0.1, 1e-5)
    same(
        aten.native_batch_norm_backward.default, x, x, weight, channel, channel, channel, channel, True, 1e-5,
        [True, affine, affine],
    )  # fmt: skip
    same(aten.relu.default, x)
    same(aten.threshold_backward.default, x, x, 0)


@pytest.mark.long
@settings(max_examples=60, deadline=None)
@given(st.lists(sizes, min_size=2, max_size=4), sizes, st.booleans(), st.integers(1, 3))
def test_layers_of_transformers(shape: list[int], width: int, turned: bool, normalized: int) -> None:
    x = torch.empty(shape)
    a, b = torch.empty(shape[:2]), torch.empty(shape[1], width)
    b = torch.empty(width, shape[1]).t() if turned else b
    same(aten.mm.default, a, b)
    same(aten.addmm.default, torch.empty(width), a, b)
    last = shape[-normalized:]
    same(aten.native_layer_norm.default, x, last, torch.empty(last), None if turned else torch.empty(last), 1e-5)
    same(aten.embedding.default, torch.empty(10, width), torch.zeros(shape, dtype=torch.int64))
    for other in (x, 2, 0.5, torch.empty(shape[-1]), x.double()):
        same(aten.mul.Tensor, x, other)
        same(aten.add.Tensor, x, other)
        same(aten.add.Tensor, other, x)


def test_the_plain_cases_are_answered_at_all() -> None:
    x, w = torch.empty(2, 4, 8, 8), torch.empty(6, 4, 3, 3)
    channel = torch.empty(4)
    assert same(aten.convolution.default, x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert same(aten.native_batch_norm.default, x, channel, channel, channel, channel, True, 0.1, 1e-5)
    assert same(aten.relu.default, x)
    assert same(aten.addmm.default, torch.empty(6), torch.empty(3, 4), torch.empty(6, 4).t())
    assert same(aten.native_layer_norm.default, torch.empty(3, 4), [4], channel, channel, 1e-5)
    assert not same(aten.relu.default, x.half())
    assert not same(aten.relu.default, x.contiguous(memory_format=torch.channels_last))


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["resnet18", *(pytest.param(name, marks=pytest.mark.long) for name in ("unet", "googlenet-aux"))]
)
def test_a_recording_is_the_same_without_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded() -> Recording:
        fake._MEMORY.clear()
        return record(program_of(Job(lambda: models.load(name, small=True), 3)))

    with_them = recorded()
    monkeypatch.setattr(fake, "SHAPES", {})
    assert recorded() == with_them
