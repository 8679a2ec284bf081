"""Under `torch.autocast("cuda")` every op casts as CUDA's autocast does, and nothing of it is left behind."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.turns import by_turns
from torch import Tensor, nn

from overspill.capture.fake_cuda import autocast
from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import RequestError

F = torch.nn.functional
aten = torch.ops.aten
HALVES = [torch.float16, torch.bfloat16]
FLOAT = torch.float32


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu() as virtual:
        yield virtual


def cuda(*shape: int, dtype: torch.dtype = FLOAT, grad: bool = False) -> Tensor:
    return torch.zeros(shape, dtype=dtype, device="cuda").requires_grad_(grad)


# --- The lists --------------------------------------------------------------------------------------------------------


def test_every_op_with_a_rule_for_cuda_has_it_here() -> None:
    there = {
        name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    }
    named = {name for name in there if not name.lower().endswith(("dimname", "dimnamelist")) and "names_" not in name}
    only_cudnn = {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"}  # no fake tensor reaches them
    here = {*autocast.LOWER, *autocast.FLOAT32, *autocast.WITH_DTYPE, *autocast.APPEND_DTYPE, *autocast.PROMOTE}
    assert named - only_cudnn <= {*here, *autocast.BANNED}


def listed(macro: str, header: str) -> set[str]:
    """The ops in one list of autocast_mode.h, as `name` or `name.overload`."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*)", header)
    assert body is not None
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", body[1])
    return {f"{name}.{overload}" if overload else name for name, overload in pairs}


def test_the_lists_are_those_of_torchs_header() -> None:
    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def without_names(ops: set[str]) -> set[str]:
        return {op for op in ops if not op.lower().endswith(("dimname", "dimnamelist"))}

    assert set(autocast.LOWER) == listed("AT_FORALL_LOWER_PRECISION_FP", header)
    assert without_names(listed("AT_FORALL_FP32", header)) <= set(autocast.FLOAT32)
    assert set(autocast.FLOAT32) - listed("AT_FORALL_FP32", header) <= {
        "rms_norm",
        "linalg_matrix_sqrth",
    }  # since 2.12 and 2.14
    assert set(autocast.WITH_DTYPE) == without_names(listed("AT_FORALL_FP32_SET_OPT_DTYPE", header))
    assert set(autocast.PROMOTE) == listed("AT_FORALL_PROMOTE", header)
    assert set(autocast.APPEND_DTYPE) <= set(re.findall(r'"(norm\.\w+)"', header))


# --- What each op gives -----------------------------------------------------------------------------------------------


def matrices(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return cuda(4, 4, dtype=dtype), cuda(4, 4, dtype=dtype)


LOWER: dict[str, Callable[[torch.dtype], Tensor]] = {
    "linear": lambda d: F.linear(cuda(3, 4, dtype=d), cuda(5, 4, dtype=d), cuda(5, dtype=d)),
    "matmul": lambda d: torch.matmul(*matrices(d)),
    "mm": lambda d: torch.mm(*matrices(d)),
    "mv": lambda d: torch.mv(cuda(3, 4, dtype=d), cuda(4, dtype=d)),
    "bmm": lambda d: torch.bmm(cuda(2, 3, 4, dtype=d), cuda(2, 4, 3, dtype=d)),
    "addmm": lambda d: torch.addmm(cuda(4, dtype=d), *matrices(d)),
    "addmv": lambda d: torch.addmv(cuda(3, dtype=d), cuda(3, 4, dtype=d), cuda(4, dtype=d)),
    "addr": lambda d: torch.addr(cuda(3, 4, dtype=d), cuda(3, dtype=d), cuda(4, dtype=d)),
    "baddbmm": lambda d: torch.baddbmm(cuda(2, 3, 3, dtype=d), cuda(2, 3, 4, dtype=d), cuda(2, 4, 3, dtype=d)),
    "addbmm": lambda d: torch.addbmm(cuda(3, 3, dtype=d), cuda(2, 3, 4, dtype=d), cuda(2, 4, 3, dtype=d)),
    "einsum": lambda d: torch.einsum("ij,jk->ik", *matrices(d)),
    "multi_dot": lambda d: torch.linalg.multi_dot([*matrices(d), cuda(4, 4, dtype=d)]),
    "vecdot": lambda d: torch.linalg.vecdot(*matrices(d)),
    "conv1d": lambda d: F.conv1d(cuda(2, 3, 9, dtype=d), cuda(4, 3, 3, dtype=d)),
    "conv2d": lambda d: F.conv2d(cuda(2, 3, 9, 9, dtype=d), cuda(4, 3, 3, 3, dtype=d)),
    "conv2d, padded alike": lambda d: F.conv2d(cuda(2, 3, 9, 9, dtype=d), cuda(4, 3, 3, 3, dtype=d), padding="same"),
    "conv3d": lambda d: F.conv3d(cuda(2, 3, 5, 5, 5, dtype=d), cuda(4, 3, 3, 3, 3, dtype=d)),
    "conv_transpose2d": lambda d: F.conv_transpose2d(cuda(2, 3, 9, 9, dtype=d), cuda(3, 4, 3, 3, dtype=d)),
    "prelu": lambda d: F.prelu(cuda(2, 3, dtype=d), cuda(1, dtype=d)),
    "attention": lambda d: F.scaled_dot_product_attention(*[cuda(2, 2, 8, 8, dtype=d)] * 3),
    "lstm cell": lambda d: nn.LSTMCell(4, 4, dtype=d, device="cuda")(cuda(2, 4, dtype=d))[0],
    "gru cell": lambda d: nn.GRUCell(4, 4, dtype=d, device="cuda")(cuda(2, 4, dtype=d)),
    "lstm": lambda d: nn.LSTM(4, 4, dtype=d, device="cuda")(cuda(3, 2, 4, dtype=d))[0],
    "gru": lambda d: nn.GRU(4, 4, dtype=d, device="cuda")(cuda(3, 2, 4, dtype=d))[0],
}
TARGET = lambda: torch.zeros(3, dtype=torch.int64, device="cuda")  # noqa: E731
FLOATING: dict[str, Callable[[torch.dtype], Tensor]] = {
    "exp": lambda d: cuda(3, dtype=d).exp(),
    "log": lambda d: cuda(3, dtype=d).log(),
    "log1p": lambda d: cuda(3, dtype=d).log1p(),
    "rsqrt": lambda d: cuda(3, dtype=d).rsqrt(),
    "reciprocal": lambda d: cuda(3, dtype=d).reciprocal(),
    "softplus": lambda d: F.softplus(cuda(3, dtype=d)),
    "a power": lambda d: cuda(3, dtype=d) ** 3,
    "a power of a number": lambda d: 2 ** cuda(3, dtype=d),
    "layer norm": lambda d: nn.LayerNorm(4, device="cuda")(cuda(3, 4, dtype=d)),
    "group norm": lambda d: nn.GroupNorm(2, 4, device="cuda")(cuda(3, 4, 5, dtype=d)),
    "cosine similarity": lambda d: F.cosine_similarity(*matrices(d)),
    "nll": lambda d: F.nll_loss(cuda(3, 4, dtype=d), TARGET()),
    "cross entropy": lambda d: F.cross_entropy(cuda(3, 4, dtype=d), TARGET()),
    "mse": lambda d: F.mse_loss(*matrices(d)),
    "l1": lambda d: F.l1_loss(*matrices(d)),
    "smooth l1": lambda d: F.smooth_l1_loss(*matrices(d)),
    "huber": lambda d: F.huber_loss(*matrices(d)),
    "kl": lambda d: F.kl_div(*matrices(d)),
    "bce with logits": lambda d: F.binary_cross_entropy_with_logits(*matrices(d)),
    "distances": lambda d: torch.cdist(*matrices(d)),
    "logsumexp": lambda d: cuda(3, 4, dtype=d).logsumexp(1),
    "bilinear interpolation": lambda d: F.interpolate(cuda(2, 3, 4, 4, dtype=d), scale_factor=2, mode="bilinear"),
    "nearest interpolation": lambda d: F.interpolate(cuda(2, 3, 4, 4, dtype=d), scale_factor=2),
    "softmax": lambda d: cuda(3, 4, dtype=d).softmax(1),
    "log softmax": lambda d: cuda(3, 4, dtype=d).log_softmax(1),
    "sum": lambda d: cuda(3, 4, dtype=d).sum(),
    "sum of rows": lambda d: cuda(3, 4, dtype=d).sum(1),
    "product": lambda d: cuda(3, 4, dtype=d).prod(),
    "product of rows": lambda d: cuda(3, 4, dtype=d).prod(1),
    "cumulated sum": lambda d: cuda(3, 4, dtype=d).cumsum(1),
    "norm": lambda d: cuda(3, 4, dtype=d).norm(),
    "norm of rows": lambda d: cuda(3, 4, dtype=d).norm(dim=1),
    "vector norm": lambda d: torch.linalg.vector_norm(cuda(3, 4, dtype=d)),
}
# Left to the dtype of their input on CUDA; the CPU's own autocast casts many of them.
AS_THEY_COME: dict[str, Callable[[torch.dtype], Tensor]] = {
    "a sum of two": lambda d: cuda(3, dtype=d) + cuda(3, dtype=d),
    "relu": lambda d: F.relu(cuda(3, dtype=d)),
    "gelu": lambda d: F.gelu(cuda(3, dtype=d)),
    "sigmoid": lambda d: cuda(3, dtype=d).sigmoid(),
    "mean": lambda d: cuda(3, 4, dtype=d).mean(),
    "batch norm": lambda d: nn.BatchNorm2d(3, device="cuda")(cuda(2, 3, 4, 4, dtype=d)),
    "max pool": lambda d: F.max_pool2d(cuda(2, 3, 4, 4, dtype=d), 2),
    "max pool in three dimensions": lambda d: F.max_pool3d(cuda(2, 3, 4, 4, 4, dtype=d), 2),
    "average pool in three dimensions": lambda d: F.avg_pool3d(cuda(2, 3, 4, 4, 4, dtype=d), 2),
    "adaptive pool in three dimensions": lambda d: F.adaptive_avg_pool3d(cuda(2, 3, 4, 4, 4, dtype=d), 2),
    "padding by reflection": lambda d: F.pad(cuda(2, 3, 4, 4, dtype=d), (1, 1, 1, 1), mode="reflect"),
    "padding by repetition": lambda d: F.pad(cuda(2, 3, 4, 4, dtype=d), (1, 1, 1, 1), mode="replicate"),
    "trace": lambda d: cuda(3, 3, dtype=d).trace(),
    "embedding": lambda d: F.embedding(TARGET(), cuda(10, 4, dtype=d)),
    "dropout": lambda d: F.dropout(cuda(3, 4, dtype=d), 0.5),
    "joining": lambda d: torch.cat([cuda(3, dtype=d), cuda(4, dtype=d)]),
    "stacking": lambda d: torch.stack([cuda(3, dtype=d), cuda(3, dtype=d)]),
}


@pytest.mark.parametrize(("op", "dtype"), by_turns(LOWER, HALVES))
def test_runs_in_lower_precision(gpu: VirtualGpu, op: str, dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype):
        assert LOWER[op](FLOAT).dtype is dtype
        if "cell" not in op and op not in {"lstm", "gru"}:
            assert LOWER[op](torch.float64).dtype is torch.float64
    assert LOWER[op](FLOAT).dtype is FLOAT


@pytest.mark.parametrize(("op", "dtype"), by_turns(FLOATING, HALVES))
def test_runs_in_float32(gpu: VirtualGpu, op: str, dtype: torch.dtype) -> None:
    with torch.autocast("cuda", dtype):
        assert FLOATING[op](dtype).dtype is FLOAT
        assert FLOATING[op](FLOAT).dtype is FLOAT


@pytest.mark.parametrize(("op", "dtype"), by_turns(AS_THEY_COME, [*HALVES, FLOAT]))
def test_keeps_the_dtype_it_is_given(gpu: VirtualGpu, op: str, dtype: torch.dtype) -> None:
    with torch.autocast("cuda", torch.float16):
        assert AS_THEY_COME[op](dtype).dtype is dtype


@pytest.mark.parametrize(
    "op",
    [
        torch.dot,
        torch.atan2,
        lambda a, b: torch.addcmul(a, a, b),
        lambda a, b: torch.tensordot(a, b, dims=1),
        lambda a, b: a.scatter_add(0, torch.zeros(3, dtype=torch.int64, device="cuda"), b),
        lambda a, b: a.index_put((torch.zeros(3, dtype=torch.int64, device="cuda"),), b),
    ],
)
def test_runs_in_float32_if_one_argument_is(gpu: VirtualGpu, op: Callable[[Tensor, Tensor], Tensor]) -> None:
    half = cuda(3, dtype=torch.float16)
    with torch.autocast("cuda", torch.float16):
        assert op(half, cuda(3)).dtype is FLOAT
        assert op(half, half).dtype is torch.float16


def test_binary_cross_entropy_is_refused_as_cuda_refuses_it(gpu: VirtualGpu) -> None:
    with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
        F.binary_cross_entropy(cuda(3), cuda(3))


def test_integers_are_left_alone(gpu: VirtualGpu) -> None:
    with torch.autocast("cuda"):
        assert torch.arange(3, device="cuda").sum().dtype is torch.int64
        assert torch.arange(3, device="cuda").cumsum(0, dtype=torch.int32).dtype is torch.int32
        assert cuda(3, dtype=torch.float16).sum(dtype=torch.float64).dtype is torch.float64
        assert cuda(3, dtype=torch.float16).softmax(0, torch.float16).dtype is torch.float16


def test_reductions_into_float32_make_no_copy_of_their_input() -> None:
    def program(_: Recorder) -> None:
        x = cuda(1000, dtype=torch.float16)
        with torch.autocast("cuda"):
            x.sum()
            x.norm()
            F.log_softmax(x, 0)

    assert "_to_copy" not in [op.name for op in record(program).ops]


# --- Casts of weights -------------------------------------------------------------------------------------------------


def copies(program: Callable[[], Any]) -> int:
    return sum(op.name == "_to_copy" for op in record(lambda _: program()).ops)


@pytest.mark.parametrize("kind", ["linear", "einsum", "cell"])
def test_a_weight_is_cast_once_a_region(kind: str) -> None:
    layer = {
        "linear": lambda w, x: F.linear(x, w),
        "einsum": lambda w, x: torch.einsum("ij,kj->ik", x, w),
        "cell": lambda w, x: torch.lstm_cell(x, (x, x), w, w),
    }[kind]

    def program(regions: int) -> Callable[[], None]:
        def run() -> None:
            weight = nn.Parameter(cuda(32 if kind == "cell" else 8, 8))
            for _ in range(regions):
                with torch.autocast("cuda"):
                    for _ in range(4):
                        layer(weight, cuda(3, 8, dtype=torch.float16))

        return run

    assert copies(program(1)) == 1
    assert copies(program(3)) == 3


def test_a_cast_weight_lives_until_the_region_ends_and_longer_where_backward_needs_it() -> None:
    seen = []

    def program(recorder: Recorder) -> None:
        weight, x = nn.Parameter(cuda(100, 100)), cuda(1, 100, dtype=torch.float16)
        start = recorder.live_bytes
        with torch.autocast("cuda"):
            with torch.no_grad():
                F.linear(x, weight)
            seen.append(recorder.live_bytes - start)
            with torch.autocast("cuda", enabled=False):
                pass
            seen.append(recorder.live_bytes - start)
        seen.append(recorder.live_bytes - start)

    record(program)
    assert seen == [2 * 10000, 2 * 10000, 0]


def test_nothing_is_kept_of_weights_where_the_cache_is_off() -> None:
    def program() -> None:
        weight = nn.Parameter(cuda(8, 8))
        with torch.autocast("cuda", cache_enabled=False):
            for _ in range(3):
                F.linear(cuda(3, 8, dtype=torch.float16), weight)
                torch.einsum("ij,kj->ik", cuda(3, 8, dtype=torch.float16), weight)

    assert copies(program) == 6


def test_recurrent_weights_are_cast_in_each_forward() -> None:
    """aten/src/ATen/cudnn/AutocastRNN.cpp keeps none."""

    def program() -> None:
        layer = nn.GRU(4, 4, device="cuda")
        with torch.autocast("cuda"):
            for _ in range(2):
                layer(cuda(3, 2, 4, dtype=torch.float16))

    assert copies(program) == 2 * 4  # the first state comes in the input's dtype


# --- Regions ----------------------------------------------------------------------------------------------------------


def test_a_region_inside_may_be_off(gpu: VirtualGpu) -> None:
    a, b = matrices(FLOAT)
    with torch.autocast("cuda"):
        assert torch.mm(a, b).dtype is torch.float16
        with torch.autocast("cuda", enabled=False):
            assert not torch.is_autocast_enabled()
            assert torch.mm(a, b).dtype is FLOAT
        assert torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", torch.bfloat16):
            assert torch.mm(a, b).dtype is torch.get_autocast_gpu_dtype() is torch.bfloat16
        assert torch.mm(a, b).dtype is torch.get_autocast_dtype("cuda") is torch.float16


def test_the_names_of_old_work(gpu: VirtualGpu) -> None:
    a, b = matrices(FLOAT)
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast():
        assert torch.mm(a, b).dtype is torch.float16
    with pytest.warns(FutureWarning), torch.cuda.amp.autocast(enabled=False, dtype=torch.bfloat16):
        assert torch.mm(a, b).dtype is FLOAT

    @torch.autocast("cuda", torch.bfloat16)
    def decorated() -> Tensor:
        return torch.mm(a, b)

    assert decorated().dtype is torch.bfloat16
    assert torch.amp.is_autocast_available("cuda")


def test_functions_with_their_own_casts(gpu: VirtualGpu) -> None:
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cuda", cast_inputs=torch.float32)
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append((x.dtype, torch.is_autocast_enabled("cuda")))
            return 2 * x * grad

    x = cuda(3, dtype=torch.float16, grad=True)
    with torch.autocast("cuda"):
        out = Square.apply(x)
    out.sum().backward()
    assert seen == [(FLOAT, False), (FLOAT, False)]
    assert x.grad.dtype is torch.float16


def test_a_checkpointed_region_is_the_same_when_it_runs_again() -> None:
    def program(_: Recorder) -> None:
        layer, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).cuda(), cuda(4, 8, grad=True)
        with torch.autocast("cuda", torch.bfloat16):
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
            assert out.dtype is torch.bfloat16
        out.sum().backward()

    ops = [op.name for op in record(program).ops]
    assert ops.count("addmm") == 2
    recomputed = record(program).allocations
    assert [a.nbytes for a in recomputed if a.name == "addmm" and a.nbytes] == [2 * 32] * 2


def test_a_scaler_unscales_clips_steps_and_updates() -> None:
    def program(_: Recorder) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
        optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda")
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda"):
                loss = model(cuda(4, 8)).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_cuda
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == before
        assert len(optimizer.state) == 4

    ops = [op.name for op in record(program).ops]
    assert ops.count("_amp_foreach_non_finite_check_and_unscale_") == 2
    assert "_foreach_norm" in ops
    assert ops.count("_amp_update_scale_") == 2


def test_gradients_of_weights_that_are_cast_are_on_the_device_in_float32() -> None:
    """Autograd's formula of the cast takes its weight for the CPU's."""

    def program(recorder: Recorder) -> None:
        layer = nn.Linear(100, 100, bias=False).cuda()
        before = recorder.live_bytes
        with torch.autocast("cuda"):
            loss = layer(cuda(1, 100)).sum()
        loss.backward()
        del loss
        assert layer.weight.grad.is_cuda
        assert recorder.live_bytes - before == 4 * 10000

    record(program)


# --- What is left behind ----------------------------------------------------------------------------------------------


def state() -> list[Any]:
    names = ("is_autocast_enabled", "get_autocast_dtype", "get_autocast_gpu_dtype", "clear_autocast_cache")
    dispatch = torch._C._dispatch_get_registrations_for_dispatch_key
    return [
        *(getattr(torch, name) for name in names),
        torch.autocast.__init__,
        torch.amp.is_autocast_available,
        torch.is_autocast_enabled("cuda"),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cuda"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        sorted(dispatch("AutocastCPU")),
    ]


def cast_by_the_cpu() -> list[torch.dtype]:
    x = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        half = torch.mm(x, x)
        return [half.dtype, half.exp().dtype, half.prod().dtype, F.cross_entropy(half, torch.tensor([0, 1])).dtype]


def test_the_cpus_own_autocast_is_back_afterwards() -> None:
    before, casts = state(), cast_by_the_cpu()
    record(lambda _: _train_mixed())
    assert state() == before
    assert cast_by_the_cpu() == casts == [torch.bfloat16, torch.bfloat16, FLOAT, FLOAT]


def test_a_program_that_fails_inside_a_region_leaves_nothing() -> None:
    before = state()

    def program(_: Recorder) -> None:
        with torch.autocast("cuda"):
            torch.mm(cuda(2, 3), cuda(2, 3))

    with pytest.raises(RequestError, match="same reduction dim"):
        record(program)
    assert state() == before


def _train_mixed() -> None:
    model = nn.Linear(4, 4).cuda()
    with torch.autocast("cuda"):
        F.cross_entropy(model(cuda(2, 4)), torch.zeros(2, dtype=torch.int64, device="cuda")).backward()
