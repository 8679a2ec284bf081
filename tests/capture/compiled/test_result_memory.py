"""Ops that write into memory that they are given: the same bits, and no memory of the result's size besides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.runtime.compiled.lowered import built_in, captured_step
from torch import Tensor, fx, nn
from torch.nn import functional as F

from overspill.capture.compiled import result_memory
from overspill.capture.compiled.result_memory import into_memory, out_overload
from overspill.capture.programs.allocations import allocations, peak_of
from overspill.runtime.reachable import same_bits

aten = torch.ops.aten
PAGE = 4096
"""Results of fewer bytes are not told from what a kernel counts with."""


class _Compared(fx.Interpreter):
    """Runs a graph; each op that can be given memory is run both ways."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.seen: set[str] = set()

    def run_node(self, n: fx.Node) -> Any:
        how = into_memory(n) if n.op == "call_function" else None
        if how is None:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        taken, result = _taken(n.target, args, kwargs)
        value = n.meta["val"]
        memory = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8).fill_(0x7F).view(value.dtype)
        into = memory.as_strided(value.shape, value.stride())
        args, kwargs = fx.node.map_arg((how.args, how.kwargs), self.env.__getitem__)
        args, kwargs = (args, {**kwargs, how.name: into}) if how.name else ((into, *args), kwargs)
        taken_into, found = _taken(how.target, args, kwargs)
        assert found.data_ptr() == into.data_ptr()
        assert found.stride() == result.stride(), n.target
        assert same_bits(found, result), n.target
        if result.nbytes >= PAGE and n.target is not aten.embedding_dense_backward.default:  # which takes a piece of it
            assert taken_into <= taken - result.nbytes, n.target
        self.seen.add(str(n.target))
        return result


def _taken(target: Any, args: Any, kwargs: Any) -> tuple[int, Tensor]:
    """The most bytes that a call has at once, and its result."""
    with torch.no_grad(), allocations() as found:
        result = target(*args, **kwargs)
    return peak_of(found.changes)[0], result


class Llama(nn.Module):
    """A small decoder with rotary positions, a mask, RMS norms and a gate."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.norm = nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.gate, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, words: Tensor, target: Tensor) -> Tensor:
        x = self.embed(words)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        half = q.shape[-1] // 2
        q = torch.cat((-q[..., half:], q[..., :half]), -1) * q.cos() + q
        scores = (q @ k.transpose(-1, -2)) / 2
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        x = x + self.out(
            torch.softmax(scores.masked_fill(mask, float("-inf")), -1, dtype=torch.float32).to(v.dtype) @ v
        )
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return F.cross_entropy(self.head(x).float().flatten(0, 1), target.flatten())


def _words() -> tuple[Tensor, Tensor]:
    drawn = torch.randint(0, 64, (4, 33), generator=torch.Generator().manual_seed(0))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Filled(nn.Module):
    """Sums tensors that one value fills."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        made = x.new_full((32, 64), 2.0), torch.full((32, 64), 3.0), torch.full_like(x, 4.0), x.new_ones(32, 64)
        return sum((self.weight * filled).sum() for filled in (*made, torch.zeros_like(x)))


MODELS = ["gpt2", *(pytest.param(name, marks=pytest.mark.long) for name in ("resnet18", "unet", "seq2seq"))]


def compared(module: nn.Module, batch: tuple[Tensor, ...]) -> set[str]:
    """The ops of a step that were run both ways."""
    step = captured_step(module, batch)
    joint = step.captured.joint
    run = _Compared(joint.module)
    values = [v.detach() if isinstance(v, Tensor) else v for v in step.inputs]
    torch.manual_seed(0)
    run.run(*values, *(torch.ones(()) for _ in joint.tangents), enable_io_processing=False)
    return run.seen


@pytest.mark.short("dtype1")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_decoders_ops(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    seen = compared(Llama().to(dtype), _words())
    wanted = {
        "mm",
        "bmm",
        "_softmax",
        "cat",
        "embedding",
        "slice_backward",
        "silu",
        "_log_softmax",
        "nll_loss_backward",
    }
    wanted |= {"_to_copy"} if dtype is torch.bfloat16 else set()
    assert wanted <= {name.split(".")[1] for name in seen}


def test_tensors_that_one_value_fills() -> None:
    seen = {name.split(".")[1] for name in compared(Filled(), (torch.randn(32, 64),))}
    assert {"new_full", "full", "full_like", "new_ones", "zeros_like"} <= seen


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_the_ops_of_a_model(model: str) -> None:
    seen = compared(*built_in(model))
    assert len(seen) >= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_an_embedding_in_pieces(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "PIECE_BYTES", 7 * 50 * dtype.itemsize)
    gradient, words = torch.randn(4, 60, 30).to(dtype), torch.randint(0, 50, (4, 60))
    whole = aten.embedding_dense_backward.default(gradient, words, 50, 3, False)
    found = result_memory.BY_HAND[aten.embedding_dense_backward.default](
        torch.empty_like(whole), gradient, words, 50, 3, False
    )
    assert same_bits(found, whole)


def test_what_copies_its_own_result_is_no_overload_for_it() -> None:
    """PyTorch generates those with `out=` that an op does not have."""
    assert out_overload(aten.mm.default, "CPU") == (aten.mm.out, "out")
    assert hasattr(aten.native_layer_norm, "out")
    assert out_overload(aten.native_layer_norm.default, "CPU") is None
    assert out_overload(aten.embedding_dense_backward.default, "CPU") is None
