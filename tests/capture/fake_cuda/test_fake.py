"""FastFakeMode's memory changes nothing but the time: shapes, strides, dtypes, aliasing and identity are torch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from overspill.capture.fake_cuda import fake
from overspill.capture.fake_cuda.fake import FastFakeMode, tensors_in
from overspill.capture.recording.recorder import Recorder
from overspill.capture.recording.recording import Recording
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import UnsupportedError
from overspill.estimation.programs import program_of
from overspill.job import Job
from overspill.models import load, optimizer_names

F = torch.nn.functional


class _Forgetful(dict[Any, Any]):
    """A memory that keeps nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_MEMORY", {})


def description(result: Any, inputs: list[Tensor]) -> list[Any]:
    """All that a program can tell of an op's outputs, and which tensors each shares its storage with."""
    outputs = tensors_in(result if isinstance(result, (list, tuple)) else (result,), [])
    everything = [*inputs, *outputs]
    storages = [t.untyped_storage()._cdata for t in everything]
    return [
        (
            type(output) is FakeTensor,
            tuple(output.shape),
            output.stride(),
            output.storage_offset(),
            output.dtype,
            output.device,
            output.untyped_storage().nbytes(),
            [i for i, other in enumerate(everything) if other is output],
            [i for i, storage in enumerate(storages) if storage == output.untyped_storage()._cdata],
        )
        for output in outputs
    ] + [type(result)]


def compare(op: Callable[..., Any], make: Callable[[], list[Any]]) -> None:
    """What `op` gives under torch's mode, under ours before it remembers, and under ours when it does."""
    seen = []
    for mode in (FakeTensorMode(), fast := FastFakeMode(), fast, fast):
        with mode:
            arguments = make()
            seen.append(description(op(*arguments), tensors_in(arguments, [])))
    assert seen[1] == seen[0]
    assert seen[2] == seen[0]
    assert seen[3] == seen[0]


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    return lambda: [torch.empty(shape, dtype=dtype)]


def two(a: tuple[int, ...], b: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[Any]]:
    return lambda: [torch.empty(a, dtype=dtype), torch.empty(b)]


def lists(*shapes: tuple[int, ...]) -> Callable[[], list[Any]]:
    return lambda: [[torch.empty(shape) for shape in shapes], [torch.empty(shape) for shape in shapes]]


def channels_last(*shape: int) -> Callable[[], list[Any]]:
    return lambda: [torch.empty(shape).to(memory_format=torch.channels_last)]


CASES: dict[str, tuple[Callable[..., Any], Callable[[], list[Any]]]] = {
    "a sum that broadcasts": (torch.add, two((4, 1, 3), (5, 1))),
    "a sum of two dtypes": (torch.add, two((4, 3), (4, 3), torch.float16)),
    "a product with a number": (lambda a: a * 2.5, x(3, 4)),
    "an integer divided": (lambda a: a / 2, x(3, dtype=torch.int64)),
    "a comparison": (torch.lt, two((3, 4), (4,))),
    "an empty tensor": (torch.relu, x(0, 5)),
    "a scalar": (torch.exp, x()),
    "a product of matrices": (torch.mm, two((3, 4), (4, 5))),
    "a batched product": (torch.matmul, two((2, 3, 4), (4, 5))),
    "a transposed product": (lambda a, b: torch.mm(a.t(), b), two((4, 3), (4, 5))),
    "a view": (lambda a: a.view(2, 6), x(3, 4)),
    "a view with a size to find": (lambda a: (a.view(2, -1, 1), a[1:].view(2, -1), a.view(-1, 1, 12)), x(3, 4)),
    "a view of no elements": (lambda a: a.view(4, 0, 2), x(0, 3)),
    "a view of a turned tensor": (lambda a: a.t()[:1].view(3, 1), x(3, 4)),
    "a view of a view": (lambda a: a[1:].transpose(0, 1)[2:], x(3, 4)),
    "a view of a view at the same place": (lambda a: (a[1:], a[1:].view(-1)), x(3, 4)),
    "expanded rows": (lambda a: a.expand(4, 3), x(1, 3)),
    "a diagonal": (lambda a: a.diagonal(), x(4, 4)),
    "windows": (lambda a: a.unfold(0, 3, 1), x(8)),
    "a flattened copy": (lambda a: a.t().reshape(-1), x(3, 4)),
    "a flattened view": (lambda a: a.reshape(-1), x(3, 4)),
    "contiguous already": (lambda a: a.contiguous(), x(3, 4)),
    "made contiguous": (lambda a: a.t().contiguous(), x(3, 4)),
    "in place": (lambda a: a.add_(1), x(3, 4)),
    "in place on a view": (lambda a: (a[0].mul_(2), a), x(3, 4)),
    "in place on a list": (torch._foreach_add_, lists((3,), (4, 2))),
    "a list from lists": (torch._foreach_add, lists((3,), (4, 2), ())),
    "square roots of a list": (lambda a, _: torch._foreach_sqrt(a), lists((3,), (4, 2))),
    "pieces that share a storage": (lambda a: a.split(2), x(5, 3)),
    "chunks": (lambda a: a.chunk(3, 1), x(2, 7)),
    "rows, unbound": (lambda a: a.unbind(0), x(3, 4)),
    "the same tensor twice": (lambda a: torch.stack([a, a]), x(3)),
    "joined": (torch.cat, lambda: [[torch.empty(2, 3), torch.empty(4, 3)]]),
    "values and positions": (lambda a: a.max(1), x(3, 4)),
    "sorted": (lambda a: a.sort(0), x(3, 4)),
    "the largest": (lambda a: a.topk(2), x(3, 4)),
    "a norm of a layer": (lambda a: torch.native_layer_norm(a, [4], None, None, 1e-5), x(3, 4)),
    "a convolution": (F.conv2d, two((2, 3, 8, 8), (5, 3, 3, 3))),
    "a convolution of other strides": (
        F.conv2d,
        lambda: [torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last), torch.empty(5, 3, 3, 3)],
    ),
    "a pool of other strides": (lambda a: F.max_pool2d(a, 2, return_indices=True), channels_last(2, 3, 8, 8)),
    "a copy of other strides": (torch.empty_like, channels_last(2, 3, 4, 4)),
    "a batch norm": (
        lambda a: torch.native_batch_norm(a, None, None, torch.zeros(3), torch.ones(3), True, 0.1, 1e-5),
        x(2, 3, 4, 4),
    ),
    "another dtype": (lambda a: a.to(torch.bfloat16), x(3, 4)),
    "the same dtype": (lambda a: a.to(torch.float32), x(3, 4)),
    "complex numbers": (lambda a: torch.view_as_complex(a) * 1j, x(3, 2)),
    "conjugates": (lambda a: a.conj(), x(3, dtype=torch.complex64)),
    "a conjugate, multiplied": (lambda a: a.conj() * 2, x(3, dtype=torch.complex64)),
    "the real part": (lambda a: a.real, x(3, dtype=torch.complex64)),
    "a tensor known by value": (lambda: torch.tensor(3) + 1, list),
    "a tensor known by value as a factor": (lambda a: a * torch.tensor(2.0), x(3)),
    "zeros": (lambda: torch.zeros(3, 4), list),
    "a range": (lambda: torch.arange(5), list),
    "random numbers": (lambda: torch.randn(3), list),
    "an embedding": (lambda a: F.embedding(torch.zeros(2, 3, dtype=torch.int64), a), x(10, 4)),
    "rows by index": (lambda a: a[torch.tensor([0, 2])], x(3, 4)),
    "rows by number, written": (lambda a: [a[i].add_(torch.tensor(2.0)) for i in (0, 2, -1)], x(3, 4)),
    "columns of a turned tensor": (lambda a: [a.t()[1:].select(i, -1) for i in (0, 1, -1)], x(3, 4)),
    "rows written by index": (lambda a: a.index_put_([torch.tensor([0, 2])], torch.zeros(2, 4)), x(3, 4)),
    "a triangle": (torch.tril, x(4, 4)),
    "padding": (lambda a: F.pad(a, (1, 2)), x(3, 4)),
    "another size in place": (lambda a: a.resize_(2, 3), x(4)),
    "another storage": (lambda a, b: a.set_(b), two((3,), (5,))),
    "detached": (lambda a: a.detach(), x(3)),
    "an alias by itself": (torch.ops.aten.alias.default, x(3)),
    "dropout": (lambda a: torch.native_dropout(a, 0.5, True), x(3, 4)),
}


@pytest.mark.parametrize("case", CASES)
def test_an_op_gives_what_it_gives_under_torchs_own_mode(case: str) -> None:
    compare(*CASES[case])


def test_an_op_that_is_remembered_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FastFakeMode()
    with mode:
        torch.empty(3, 4) + 1
        monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", None)
        assert (torch.empty(3, 4) + 1).shape == (3, 4)


def test_rows_written_one_by_one_are_asked_of_torch_once(monkeypatch: pytest.MonkeyPatch) -> None:
    number = torch.tensor(2.0)
    with FastFakeMode():
        rows = torch.empty(3, 4)
        rows[0].fill_(number)
        monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", None)
        assert [rows[i].fill_(number).storage_offset() for i in (1, 2)] == [4, 8]


def test_work_of_the_host_is_done_and_not_recorded() -> None:
    def observe(*_: Any) -> None:
        raise AssertionError

    real = torch.ones(3)
    with FastFakeMode(observe, Recorder().is_of_host):
        assert (real + 1).sum().item() == 6
        with pytest.raises(AssertionError):
            torch.empty(3, device="cuda")


def test_integers_floats_and_booleans_of_one_value_are_different_arguments() -> None:
    with FastFakeMode():
        for value, dtype in ((1, torch.int64), (1.0, torch.float32), (True, torch.int64), (1, torch.int64)):
            assert (torch.empty(2, dtype=torch.int64) + value).dtype is dtype


UNARY = (torch.relu, torch.exp, torch.neg, lambda a: a.sum(), lambda a: a.mean(-1, keepdim=True), lambda a: a.flatten())
BINARY = (torch.add, torch.mul, torch.maximum, torch.sub)
VIEWS = (
    lambda a: a.transpose(0, -1) if a.dim() else a,
    lambda a: a.unsqueeze(0),
    lambda a: a[..., ::2] if a.dim() else a,
    lambda a: a.flip(0) if a.dim() else a,
    lambda a: a.squeeze(),
    lambda a: a.narrow(0, 0, max(0, a.shape[0] - 1)) if a.dim() else a,
    lambda a: a.movedim(0, -1) if a.dim() else a,
)
dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64))
shapes = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    shapes,
    dtypes,
    dtypes,
    st.lists(st.sampled_from(VIEWS), max_size=3),
    st.sampled_from(UNARY),
    st.sampled_from(BINARY),
)
def test_random_chains_of_views_and_ops_agree(
    shape: list[int], dtype: torch.dtype, other: torch.dtype, views: list[Any], unary: Any, binary: Any
) -> None:
    def chain(a: Tensor, b: Tensor) -> list[Tensor]:
        seen = [a]
        for view in views:
            seen.append(view(seen[-1]))
        seen.append(unary(seen[-1]))
        seen.append(binary(seen[-2], b))
        return seen

    last = shape[-1:]
    if views:
        last = []
    compare(chain, lambda: [torch.empty(shape, dtype=dtype), torch.empty(last, dtype=other)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(3, 7), st.sampled_from((1, 3)),
    st.integers(1, 2), st.booleans(), st.booleans(),
)  # fmt: skip
def test_random_convolutions_agree_forward_and_backward(
    batch: int, channels: int, groups: int, size: int, kernel: int, stride: int, last: bool, bias: bool
) -> None:
    layout = torch.channels_last if last else torch.contiguous_format

    def make() -> list[Any]:
        image = torch.empty(batch, channels * groups, size, size).to(memory_format=layout)
        return [image, torch.empty(2 * groups, channels, kernel, kernel), torch.empty(2 * groups) if bias else None]

    def there_and_back(image: Tensor, weight: Tensor, offset: Tensor | None) -> list[Any]:
        out = F.conv2d(image, weight, offset, stride, kernel // 2, 1, groups)
        sizes = None if offset is None else [2 * groups]
        return [out, *torch.ops.aten.convolution_backward(
            out, image, weight, sizes, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups, [True, True, bias]
        )]  # fmt: skip

    compare(there_and_back, make)


def recorded(model: str, optimizer: str, dtype: str = "float32") -> Recording:
    job = Job(lambda: load(model, small=True), 2, None if optimizer == "none" else optimizer, dtype)
    return record(program_of(job))


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        ("gpt2", "adamw"),
        *(pytest.param("resnet18", name, marks=pytest.mark.long) for name in optimizer_names()),
        pytest.param("unet", "momentum", marks=pytest.mark.long),
        pytest.param("bert-base", "adam", marks=pytest.mark.long),
    ],
)
def test_a_recorded_training_is_the_same_without_memory(
    model: str, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if model == "bert-base":
        pytest.importorskip("transformers")
    first, again = recorded(model, optimizer), recorded(model, optimizer)
    monkeypatch.setattr(fake, "_MEMORY", _Forgetful())
    without = recorded(model, optimizer)
    assert first == without
    assert again == without


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bfloat16", "amp"])
def test_mixed_precision_and_inference_are_the_same_without_memory(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_memory = [recorded("gpt2", name, dtype) for name in ("adamw", "none", "adamw", "none")]
    assert with_memory[:2] == with_memory[2:]
    monkeypatch.setattr(fake, "_MEMORY", _Forgetful())
    assert [recorded("gpt2", name, dtype) for name in ("adamw", "none")] == with_memory[:2]


def test_the_memory_is_cleared_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake, "_MOST_REMEMBERED", 10)
    with FastFakeMode():
        for size in range(40):
            torch.empty(size) + 1
            assert len(fake._MEMORY) <= 10


@pytest.mark.parametrize("rows", [4, 1 << 20])
def test_an_op_whose_shapes_torch_only_computes_runs_for_real_if_it_is_small(rows: int) -> None:
    def program(_: Any) -> None:
        scores = torch.zeros(rows, 128, device="cuda", requires_grad=True)
        F.multi_margin_loss(scores, torch.zeros(rows, dtype=torch.int64, device="cuda")).backward()
        assert scores.grad.shape == scores.shape

    if rows == 4:
        record(program)
    else:
        with pytest.raises(UnsupportedError, match="multi_margin_loss"):
            record(program)


def test_the_memory_holds_no_tensors() -> None:
    recorded("resnet18", "adamw")

    def walk(value: Any) -> Iterator[Any]:
        yield value
        if isinstance(value, (list, tuple)):
            for item in value:
                yield from walk(item)

    kept = [item for pair in fake._MEMORY.items() for item in walk(pair)]
    assert kept
    assert not any(isinstance(item, (Tensor, torch.UntypedStorage)) for item in kept)
