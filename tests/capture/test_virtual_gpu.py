"""Programs run on the virtual GPU as they would on a real one, and torch is as before when they are done."""

from __future__ import annotations

import copy
import io
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils import _device
from torch.utils.checkpoint import checkpoint

from overspill.capture import torch_patches
from overspill.capture.eager import record
from overspill.capture.virtual_gpu import VirtualGpu, optimizer_hooks
from overspill.core.errors import OverspillError, RequestError, UnsupportedError

F = torch.nn.functional
optim = torch.optim
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with warnings.catch_warnings(), VirtualGpu() as virtual:
        warnings.simplefilter("error")
        yield virtual


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batch() -> Tensor:
    return torch.randn(4, 8, device="cuda")


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = 2) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).sum().backward()
        optimizer.step()


# --- What is left behind ----------------------------------------------------------------------------------------------


def owners() -> dict[str, Any]:
    """Everything that may be replaced, by name."""
    return {
        "Tensor": torch.Tensor, "FakeTensor": FakeTensor, "Module": nn.Module, "Parameter": nn.Parameter,
        "UninitializedParameter": nn.UninitializedParameter, "UninitializedBuffer": nn.UninitializedBuffer,
        "Mixin": torch_patches.UninitializedTensorMixin, "DataParallel": nn.DataParallel, "RNNBase": nn.RNNBase,
        "GradScaler": torch.amp.GradScaler, "UntypedStorage": torch.UntypedStorage, "Optimizer": optim.Optimizer,
        "autocast": torch.autocast, "torch": torch, "cuda": torch.cuda, "nvtx": torch.cuda.nvtx, "amp": torch.amp,
        "accelerator": torch.accelerator, "cudnn": torch.backends.cudnn, "init": nn.init,
        "lbfgs": __import__("sys").modules["torch.optim.lbfgs"], "_C": torch._C,
        "parametrizations": nn.utils.parametrizations,
    }  # fmt: skip


def everything() -> dict[str, Any]:
    """All attributes of all owners, torch's hooks and tables, and its settings."""
    attributes = {
        f"{name}.{key}": value
        for name, owner in owners().items()
        for key, value in vars(owner).items()
        if not key.startswith("__") or key in {"__new__", "__bool__", "__int__", "__float__", "__index__", "__format__"}
    }
    settings = {
        "forward pre hooks": list(module_hooks._global_forward_pre_hooks),
        "forward hooks": list(module_hooks._global_forward_hooks),
        "step pre hooks": list(optimizer_hooks._global_optimizer_pre_hooks),
        "step post hooks": list(optimizer_hooks._global_optimizer_post_hooks),
        "foreach types": list(optimizer_hooks._foreach_supported_types),
        "factories": set(_device._device_constructors()),
        "builtins": dict(torch.jit._builtins._get_builtin_table()),
        "grad": torch.is_grad_enabled(),
        "modes": torch._C._len_torch_dispatch_stack(),
        "kernels": [
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", key)
            for op in ("dropout", "softmax.int", "scaled_dot_product_attention", "lstm.input", "rms_norm")
            for key in ("AutogradCPU", "AutocastCPU")
        ],
    }
    return attributes | settings


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert [name for name in before if name not in after] == []
    lazily = {name for name in after if name not in before}  # submodules that torch imported meanwhile
    assert [name for name in lazily if callable(after[name]) and not isinstance(after[name], type)] == []
    plain = (int, bool, list, set, dict)
    changed = [
        name for name, value in before.items()
        if (after[name] != value if isinstance(value, plain) else after[name] is not value)
    ]  # fmt: skip
    assert changed == []


def warmed() -> dict[str, Any]:
    """`everything()`, after torch has imported what a program makes it import."""
    with VirtualGpu():
        train(mlp().cuda(), optim.AdamW(nn.Linear(1, 1).cuda().parameters()))
    return everything()


def test_everything_is_put_back() -> None:
    before = warmed()
    with VirtualGpu():
        assert "Tensor.to" not in before  # it is inherited, and hidden for a while
        assert "to" in vars(torch.Tensor)
        assert torch.zeros is not before["torch.zeros"]
        model = mlp().cuda()
        train(model, optim.SGD(model.parameters(), lr=0.1))
    assert_same(before, everything())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, UnsupportedError])
def test_everything_is_put_back_after_an_error(error: type[BaseException]) -> None:
    before = warmed()

    def program(_: Any) -> None:
        model = mlp().cuda()
        with torch.autocast("cuda"), torch.no_grad():
            model(batch())
            raise error("stop")

    with pytest.raises(error if error is not ValueError else RequestError, match="stop"):
        record(program)
    assert_same(before, everything())


def test_an_error_on_the_way_in_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    before = warmed()
    virtual = VirtualGpu()
    monkeypatch.setattr(type(virtual._mode), "__enter__", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        virtual.__enter__()
    monkeypatch.undo()
    assert_same(before, everything())
    with VirtualGpu():
        pass


def test_the_functions_that_torch_remembers_are_its_own(gpu: VirtualGpu) -> None:
    with torch.device("cuda"):
        assert torch.zeros(3).is_cuda
        assert nn.Linear(3, 3).weight.is_cuda
        assert torch.zeros(3, device="cpu").device == CPU
    assert torch.zeros not in _device._device_constructors()


def test_a_recording_inside_a_recording_is_an_error() -> None:
    with pytest.raises(RequestError, match="under way"):
        record(lambda _: record(lambda _: None))
    record(lambda _: None)


def test_a_recording_in_another_thread_meanwhile_is_an_error() -> None:
    found = []

    def other() -> None:
        try:
            record(lambda _: None)
        except RequestError as error:
            found.append(error)

    def program(_: Any) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    record(program)
    assert "under way" in str(found[0])


def test_other_threads_may_use_the_host_meanwhile(gpu: VirtualGpu) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(F.softmax(torch.ones(2), 0).tolist()))
    thread.start()
    thread.join()
    assert found == [[0.5, 0.5]]


# --- Where tensors are ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda"), torch.device("cuda", 0)])
def test_every_way_to_say_gpu(gpu: VirtualGpu, device: Any) -> None:
    host = torch.randn(3)
    there = host.to(device)
    assert there.device == GPU
    assert there.is_cuda
    assert there.get_device() == 0
    assert not there.is_cpu
    assert host.device == CPU
    assert host.cuda(device).is_cuda
    assert there.to(device) is there
    assert torch.zeros(3, device=device).is_cuda
    assert torch.tensor([1.0], device=device).is_cuda
    assert nn.Linear(2, 2, device=device).weight.is_cuda
    assert there.new_zeros(2).is_cuda
    assert torch.empty_like(host, device=device).is_cuda


def test_every_argument_of_to(gpu: VirtualGpu) -> None:
    host = torch.randn(2, 3, 4, 4)
    there = host.to(device="cuda", dtype=torch.float16, non_blocking=True, memory_format=torch.channels_last)
    assert there.is_cuda
    assert there.dtype is torch.float16
    assert there.is_contiguous(memory_format=torch.channels_last)
    assert host.to(there).dtype is torch.float16
    assert host.to(there).is_cuda
    assert host.to(other=there).is_cuda
    assert there.to(host).device == CPU
    assert there.to(host).dtype is torch.float32
    assert there.to(torch.float64).is_cuda
    assert there.to(torch.float16) is there
    assert there.to(torch.float16, copy=True) is not there
    assert there.to("cuda", torch.float16, False, True) is not there
    assert there.to("cuda", torch.float16, False, False) is there
    assert there.to(there, copy=True) is not there
    assert there.to("cpu", torch.float64).dtype is torch.float64
    assert there.cpu().device == CPU
    assert there.cpu().cuda().is_cuda
    assert there.half() is there
    assert there.float().is_cuda


def test_a_copy_has_memory_of_its_own() -> None:
    seen = []

    def program(recorder: Any) -> None:
        x = torch.zeros(100, device="cuda")
        for make in (lambda: x.to("cuda"), lambda: x.to("cuda", copy=True), x.half, x.cpu, x.clone, lambda: x.data):
            before = recorder.live_bytes
            made = make()
            seen.append(recorder.live_bytes - before)
            del made

    record(program)
    assert seen == [0, 400, 200, 0, 400, 0]


def test_factories_and_their_likes_go_where_they_are_told(gpu: VirtualGpu) -> None:
    there = torch.zeros(3, device="cuda")
    assert there.new_zeros(3, device="cpu").device == CPU
    assert torch.zeros_like(there, device="cpu").device == CPU
    for make in (
        torch.zeros,
        torch.ones,
        torch.rand,
        torch.randn,
        torch.empty,
        torch.arange,
        torch.randperm,
        torch.eye,
    ):
        assert make(3, device="cuda").is_cuda
        assert make(3).device == CPU
    assert torch.full((3,), 1.0, device="cuda").is_cuda
    assert torch.as_tensor([1.0], device="cuda").is_cuda
    assert torch.linspace(0, 1, 5, device="cuda").is_cuda
    assert torch.from_numpy(torch.ones(3).numpy()).cuda().is_cuda
    assert torch.empty(4, pin_memory=True).device == CPU


def test_types_by_name(gpu: VirtualGpu) -> None:
    there, host = torch.zeros(3, device="cuda"), torch.zeros(3)
    assert there.type() == "torch.cuda.FloatTensor"
    assert host.type() == "torch.FloatTensor"
    assert host.type("torch.cuda.HalfTensor").type() == "torch.cuda.HalfTensor"
    assert there.type(torch.float64).type() == "torch.cuda.DoubleTensor"
    assert there.type("torch.LongTensor").device == CPU
    assert there.type(torch.FloatTensor).device == CPU
    assert host.type(torch.cuda.FloatTensor).is_cuda
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert torch.cuda.LongTensor([1, 2]).dtype is torch.int64
    assert isinstance(there, torch.cuda.FloatTensor)
    assert not isinstance(host, torch.cuda.FloatTensor)
    with pytest.raises(ValueError, match="invalid type"):
        there.type("torch.cuda.OddTensor")


def test_gradients_cross_between_host_and_device_as_tensors_do(gpu: VirtualGpu) -> None:
    x, seen = torch.zeros(10, device="cuda", requires_grad=True), []
    away = (x * 2).cpu()
    back = (away * 3).cuda()
    away.register_hook(lambda grad: seen.append(grad.device))
    back.register_hook(lambda grad: seen.append(grad.device))
    back.sum().backward()
    assert seen == [GPU, CPU]
    assert x.grad.is_cuda
    weight = nn.Parameter(torch.zeros(10))
    (weight.cuda() * 2).sum().backward()
    assert weight.grad.device == CPU


# --- Modules ----------------------------------------------------------------------------------------------------------


def test_modules_move_and_convert(gpu: VirtualGpu) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model.to("cuda")
    weight, mean, count = model[0].weight, model[1].running_mean, model[1].num_batches_tracked
    assert weight.is_cuda and mean.is_cuda and count.is_cuda  # noqa: PT018
    model.half()
    assert model[0].weight.dtype is model[1].running_mean.dtype is torch.float16
    assert model[1].num_batches_tracked.dtype is torch.int64
    assert model[0].weight is weight
    model.to("cuda", torch.bfloat16)
    assert model[0].weight.dtype is torch.bfloat16
    model.float().to(memory_format=torch.channels_last)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    image = torch.randn(2, 3, 8, 8).to("cuda", memory_format=torch.channels_last)
    assert model(image).is_contiguous(memory_format=torch.channels_last)
    model(image).sum().backward()
    model.cpu()
    assert model[0].weight.device == model[0].weight.grad.device == CPU
    assert model.to_empty(device="cuda")[0].weight.is_cuda


def test_a_model_on_the_host_takes_no_memory_however_large(gpu: VirtualGpu) -> None:
    layer = nn.Linear(30000, 30000)
    assert layer.weight.device == CPU
    assert gpu.recorder.live_bytes == 0
    layer.cuda()
    assert gpu.recorder.live_bytes == 4 * (30000 * 30000 + 30000)


def test_parameters_and_buffers_that_are_registered(gpu: VirtualGpu) -> None:
    module = nn.Module()
    module.register_parameter("weight", nn.Parameter(torch.randn(3)))
    module.register_parameter("absent", None)
    module.register_buffer("kept", torch.ones(3))
    module.register_buffer("nothing", None)
    module.register_buffer("dropped", torch.zeros(2), persistent=False)
    module.cuda()
    assert module.weight.is_cuda and module.kept.is_cuda and module.dropped.is_cuda  # noqa: PT018
    assert list(module.state_dict()) == ["weight", "kept"]


class Tagged(nn.Parameter):
    """A parameter as libraries make their own."""

    def __new__(cls, data: Tensor, tag: str = "none") -> Any:
        made = super().__new__(cls, data, True)
        made.tag = tag
        return made

    def shout(self) -> str:
        return self.tag.upper()


def test_a_parameter_of_a_class_of_its_own_keeps_it(gpu: VirtualGpu) -> None:
    module = nn.Module()
    module.weight = Tagged(torch.randn(3), "a")
    module.cuda()
    assert isinstance(module.weight, Tagged)
    assert isinstance(module.weight, nn.Parameter)
    assert module.weight.shout() == "A"
    assert module.weight.is_cuda
    assert [name for name, _ in module.named_parameters()] == ["weight"]
    again = copy.deepcopy(module)
    assert isinstance(again.weight, Tagged)
    (module.weight * 2).sum().backward()
    assert module.weight.grad.is_cuda
    assert not isinstance(module.weight * 2, nn.Parameter)


def test_lazy_modules_are_made_on_the_device(gpu: VirtualGpu) -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(2)).cuda()
    assert isinstance(model[0].weight, nn.UninitializedParameter)
    assert nn.parameter.is_lazy(model[1].running_mean)
    model(torch.randn(3, 5, 8, 8, device="cuda")).sum().backward()
    assert model[0].weight.shape == (4, 5, 3, 3)
    assert model[3].weight.shape == (2, 4 * 36)
    assert all(parameter.is_cuda and parameter.grad.is_cuda for parameter in model.parameters())
    assert model[1].running_mean.is_cuda
    assert not nn.parameter.is_lazy(model[1].running_mean)
    model(torch.randn(3, 5, 8, 8, device="cuda"))


def test_lazy_modules_are_made_on_the_device_they_are_asked_for(gpu: VirtualGpu) -> None:
    layer = nn.LazyLinear(4, device="cuda")
    layer(torch.randn(3, 5, device="cuda"))
    assert layer.weight.is_cuda


def test_a_deep_copy_is_another_module_in_the_same_mode(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    model(batch()).sum().backward()
    before = gpu.recorder.live_bytes
    again = copy.deepcopy(model)
    assert gpu.recorder.live_bytes == before + before // 2  # the gradients are not copied
    assert again[0].weight.is_cuda
    assert again[0].weight is not model[0].weight
    assert again[0].weight.grad is None
    assert again[0].weight.fake_mode is model[0].weight.fake_mode
    again(batch()).sum().backward()
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(model(batch()))


def test_tied_weights_stay_tied_when_copied_and_moved(gpu: VirtualGpu) -> None:
    model = nn.ModuleDict({"in": nn.Embedding(10, 8), "out": nn.Linear(8, 10, bias=False)})
    model["out"].weight = model["in"].weight
    again = copy.deepcopy(model.cuda())
    assert model["out"].weight is model["in"].weight
    assert again["out"].weight is again["in"].weight
    assert gpu.recorder.live_bytes == 2 * 4 * 80


def test_real_weights_load_into_fake_ones(gpu: VirtualGpu) -> None:
    real = {name: torch.ones(value.shape) for name, value in mlp().state_dict().items()}
    model = mlp()
    model.load_state_dict(real)
    model.cuda().load_state_dict(real)
    assert model.state_dict()["0.weight"].is_cuda
    other = mlp().cuda()
    other.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict(), assign=True)
    assert other[0].weight.is_cuda
    with pytest.raises(RuntimeError, match="size mismatch"):
        nn.Linear(3, 3).load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(3)})


def test_a_model_from_before_cannot_be_moved_and_its_deep_copy_can() -> None:
    model = mlp()
    with pytest.raises(RequestError, match=r"weight of Linear was made before.*deep copy"):
        record(lambda _: model.cuda())
    record(lambda _: copy.deepcopy(model).cuda()(batch()).sum().backward())
    assert type(model[0].weight) is nn.Parameter
    assert model[0].weight.device == CPU


def test_files_of_tensors_are_read_for_real(gpu: VirtualGpu, tmp_path: Any) -> None:
    torch.save({"x": torch.arange(3)}, tmp_path / "host.pt")
    assert torch.load(tmp_path / "host.pt")["x"].tolist() == [0, 1, 2]
    assert torch.load(tmp_path / "host.pt", map_location="cuda")["x"].is_cuda
    assert pickle.loads(pickle.dumps(torch.ones(3))).tolist() == [1.0, 1.0, 1.0]
    torch.save(mlp().cuda().state_dict(), io.BytesIO())


def test_weights_may_be_replaced_by_hand(gpu: VirtualGpu) -> None:
    layer = nn.Linear(4, 4).cuda()
    layer.weight.data = layer.weight.data.clone() * 2
    layer.weight.data[0] = 1
    layer.weight.grad = torch.zeros_like(layer.weight)
    layer.weight = nn.Parameter(torch.randn(4, 4, device="cuda"))
    assert layer.weight.is_cuda
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(layer.parameters()), layer.parameters())
    for fill in (nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.orthogonal_, nn.init.trunc_normal_):
        fill(layer.weight)
        fill(nn.Linear(4, 4).weight)


def test_parametrized_weights(gpu: VirtualGpu) -> None:
    kinds = nn.utils.parametrizations
    model = nn.Sequential(
        kinds.weight_norm(nn.Linear(8, 8)), kinds.spectral_norm(nn.Linear(8, 8)), kinds.orthogonal(nn.Linear(8, 8))
    ).cuda()
    model(batch()).sum().backward()
    assert all(parameter.grad.is_cuda for parameter in model.parameters())


def test_recurrent_weights_are_copied_to_one_buffer_when_they_arrive() -> None:
    """torch/nn/modules/rnn.py: `_apply` flattens; for a moment there are two of them."""
    peaks = []

    def program(recorder: Any) -> None:
        nn.LSTM(64, 64).cuda()
        peaks.append(recorder.peak_bytes)

    record(program)
    assert peaks == [2 * 4 * 4 * (64 * 64 * 2 + 64 * 2)]


def test_one_gpu_of_data_parallel(gpu: VirtualGpu) -> None:
    model = nn.DataParallel(mlp().cuda())
    model(torch.randn(4, 8)).sum().backward()
    assert model.module[0].weight.grad.is_cuda


# --- Autograd ---------------------------------------------------------------------------------------------------------


def test_gradients_are_off_where_they_are_off(gpu: VirtualGpu) -> None:
    model = mlp().cuda().eval()
    with torch.no_grad():
        assert not model(batch()).requires_grad
    with torch.inference_mode():
        out = model(batch())
        assert out.is_cuda
        assert out.is_inference()
    assert model(batch()).requires_grad


def test_inference_mode_runs_the_same_ops_as_no_grad() -> None:
    def ops(mode: Callable[[], Any]) -> list[str]:
        def program(_: Any) -> None:
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0).cuda()
            recurrent = nn.LSTM(16, 8).cuda()
            with mode():
                recurrent(F.dropout(layer(torch.randn(2, 5, 16, device="cuda")).softmax(-1), 0.1))

        views = {"view", "t", "transpose", "_unsafe_view", "unsqueeze", "squeeze", "expand", "select", "detach"}
        return [op.name for op in record(program).ops if op.name not in views]

    assert ops(torch.inference_mode) == ops(torch.no_grad)


def test_functions_of_the_programs_own(gpu: VirtualGpu) -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            assert x.is_cuda
            return 2 * x * grad

    x = torch.randn(3, device="cuda", requires_grad=True)
    Square.apply(x).sum().backward()
    assert x.grad.is_cuda


def test_hooks_see_the_device(gpu: VirtualGpu) -> None:
    model, seen = mlp().cuda(), []
    model[0].weight.register_hook(lambda grad: seen.append(grad.is_cuda))
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.is_cuda))
    model[2].register_full_backward_hook(lambda _, __, grads: seen.append(grads[0].is_cuda))
    model[2].register_forward_hook(lambda _, __, out: seen.append(out.is_cuda))
    model(batch()).sum().backward()
    assert seen == [True] * 4


def test_second_derivatives(gpu: VirtualGpu) -> None:
    x, model = torch.randn(2, 8, device="cuda", requires_grad=True), mlp().cuda()
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    (slope.norm(2) - 1).pow(2).backward()
    assert model[0].weight.grad.is_cuda


def test_gradients_are_accumulated_zeroed_and_dropped(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    parameters = gpu.recorder.live_bytes
    for _ in range(3):
        (model(batch()) / 3).sum().backward()
        assert gpu.recorder.live_bytes == 2 * parameters
    model.zero_grad(set_to_none=False)
    assert gpu.recorder.live_bytes == 2 * parameters
    for parameter in model.parameters():
        parameter.grad = None
    assert gpu.recorder.live_bytes == parameters


def test_frozen_weights_with_adapters_have_no_gradients_and_no_state(gpu: VirtualGpu) -> None:
    base = nn.Linear(64, 64, bias=False).cuda().requires_grad_(False)
    down, up = nn.Parameter(torch.zeros(64, 2, device="cuda")), nn.Parameter(torch.zeros(2, 64, device="cuda"))
    optimizer, x = optim.AdamW([down, up]), torch.randn(4, 64, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        (base(x) + x @ down @ up).sum().backward()
        optimizer.step()
    assert base.weight.grad is None
    scalars = 2 * 4
    assert gpu.recorder.live_bytes - scalars <= 4 * (64 * 64 + 4 * 64 + 4 * (2 * 128)) <= gpu.recorder.live_bytes


def test_checkpoints_hooks_and_savings_on_the_host(gpu: VirtualGpu) -> None:
    model, x = mlp().cuda(), batch().requires_grad_()
    for reentrant in (False, True):
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        loss = model(x).sum()
    loss.backward()
    assert x.grad.is_cuda


def test_functional_calls_and_vectorized_maps(gpu: VirtualGpu) -> None:
    model, x = mlp().cuda(), batch()
    weights = {name: value.detach() for name, value in model.named_parameters()}

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row,)).sum()

    assert torch.func.grad(loss)(weights, x)["0.weight"].is_cuda
    rows = torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, x)
    assert rows["0.weight"].shape == (4, 16, 8)
    assert torch.vmap(lambda row: (row * 2).sum())(x).is_cuda


def test_views_written_in_place(gpu: VirtualGpu) -> None:
    x = torch.randn(4, 6, device="cuda", requires_grad=True)
    y = x * 1
    y[:2].mul_(2)
    y[0, 0] = 1
    y[:, 1:3] += 1
    y.view(-1)[3:5].zero_()
    y.sum().backward()
    assert x.grad.shape == (4, 6)


# --- Optimizers -------------------------------------------------------------------------------------------------------

NAMES = (
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "NAdam",
    "RAdam",
    "Adamax",
    "ASGD",
    "Rprop",
    "Adafactor",
)
FLAGS: dict[str, dict[str, Any]] = {
    "default": {}, "foreach": {"foreach": True}, "one by one": {"foreach": False}, "capturable": {"capturable": True},
    "fused": {"fused": True}, "maximize": {"maximize": True}, "a rate on the device": {"lr": None},
}  # fmt: skip


@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_takes_its_steps(gpu: VirtualGpu, name: str, flags: str) -> None:
    model, options = mlp().cuda(), dict(FLAGS[flags])
    if "lr" in options:
        options = {"lr": torch.tensor(0.01, device="cuda"), "foreach": False}
    warnings.simplefilter("ignore")  # torch's own advice about some of these flags
    try:
        optimizer = getattr(optim, name)(model.parameters(), **options)
        train(model, optimizer)
    except (TypeError, RuntimeError, ValueError) as error:
        assert any(word in str(error) for word in ("unexpected keyword", "fused", "not supported", "Tensor"))  # noqa: PT017
        return
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    assert all(value.is_cuda for value in state if value.dim())


def test_optimizers_take_the_foreach_path_as_they_do_on_cuda() -> None:
    def ops(**options: Any) -> set[str]:
        def program(_: Any) -> None:
            model = mlp().cuda()
            train(model, optim.Adam(model.parameters(), **options))

        return {op.name for op in record(program).ops if op.phase == "update"}

    assert any(name.startswith("_foreach") for name in ops())
    assert not any(name.startswith("_foreach") for name in ops(foreach=False))
    assert "_fused_adam_" in ops(fused=True)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_goes_on_to_its_last_iteration(gpu: VirtualGpu, search: str | None) -> None:
    model, calls = mlp().cuda(), []
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn=search)

    def closure() -> Tensor:
        calls.append(1)
        optimizer.zero_grad()
        loss = model(batch()).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(calls) >= 4
    assert len(optimizer.state[model[0].weight]["old_dirs"]) == 3


def test_schedulers_averages_and_saved_states(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedules = [optim.lr_scheduler.CosineAnnealingLR(optimizer, 10), optim.lr_scheduler.StepLR(optimizer, 2)]
    plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    average = optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        loss = model(batch()).sum()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        for schedule in schedules:
            schedule.step()
        plateau.step(loss.item())
    assert optimizer.param_groups[0]["lr"] < 0.1
    other = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other.load_state_dict(optimizer.state_dict())
    train(model, other)


def test_gradients_are_clipped(gpu: VirtualGpu) -> None:
    model = mlp().cuda()
    model(batch()).sum().backward()
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0).is_cuda
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False, error_if_nonfinite=True)
    nn.utils.clip_grad_value_(model.parameters(), 1.0)


# --- torch.cuda -------------------------------------------------------------------------------------------------------


def test_what_programs_ask_torch_cuda(gpu: VirtualGpu) -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 1
    assert torch.cuda.current_device() == 0
    assert torch.cuda.get_device_capability() == (8, 0)
    assert torch.cuda.get_device_properties(0).total_memory == 1 << 40
    assert torch.cuda.memory_allocated() == 0
    kept = torch.zeros(100, device="cuda")
    assert torch.cuda.memory_allocated() == 400
    free, total = torch.cuda.mem_get_info()
    assert total - free == 400
    del kept
    assert torch.cuda.max_memory_allocated() == 400
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    for function in (torch.cuda.synchronize, torch.cuda.empty_cache, torch.cuda.init, torch.cuda.memory_summary):
        function()
    torch.cuda.manual_seed_all(0)
    torch.cuda.set_device(0)
    with torch.cuda.device(0), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
    with torch.cuda.nvtx.range("step"):
        torch.cuda.nvtx.mark("here")
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    assert event.elapsed_time(event) >= 0
    assert not torch.cuda.is_current_stream_capturing()
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    generator = torch.Generator(device="cuda").manual_seed(0)
    assert torch.randn(3, device="cuda", generator=generator).is_cuda


def test_scripted_functions_and_compiled_models_run(gpu: VirtualGpu) -> None:
    warnings.simplefilter("ignore")  # torch.jit.script is deprecated

    @torch.jit.script
    def scaled(x: Tensor) -> Tensor:
        return x * torch.ones(1)

    assert scaled(torch.ones(2)).tolist() == [1.0, 1.0]
    model = torch.compile(mlp().cuda())
    model(batch()).sum().backward()


def test_data_loaders_feed_the_device(gpu: VirtualGpu) -> None:
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(torch.arange(20.0).view(10, 2), torch.arange(10) % 4)
    seen = 0
    for x, y in DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):
        seen += len(y)
        assert int(y.max()) < 4  # the host's values are real
        F.cross_entropy(nn.Linear(2, 4).cuda()(x.cuda(non_blocking=True)), y.to("cuda")).backward()
    assert seen == 10


# --- Errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        lambda: (
            nn.Embedding(10, 4, sparse=True).cuda()(torch.zeros(3, dtype=torch.int64, device="cuda")).sum().backward()
        ),
        lambda: torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.int64), torch.ones(1), (2, 2)).cuda(),
    ],
)
def test_sparse_tensors_are_said_not_to_be_supported(program: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedError, match=r"test_virtual_gpu\.py:\d+.*Sparse"):
        record(lambda _: program())


def test_a_thread_that_uses_the_device_is_told_so() -> None:
    found: list[BaseException] = []

    def work() -> None:
        try:
            torch.ones(3).cuda()
        except OverspillError as error:
            found.append(error)

    def program(_: Any) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    record(program)
    assert "thread of its own" in str(found[0])
