"""Torch is as before when programs on the virtual GPU are done, or have failed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.capture.virtual_gpu.virtual import CPU, F, batch, mlp, optim, refused_in_another_thread, train
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as module_hooks
from torch.utils import _device

from overspill.capture.virtual_gpu import torch_patches
from overspill.capture.virtual_gpu.gpu import VirtualGpu, optimizer_hooks
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import RequestError, UnsupportedError


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
    error = refused_in_another_thread(lambda: record(lambda _: None))
    assert isinstance(error, RequestError)
    assert "under way" in str(error)


def test_other_threads_may_use_the_host_meanwhile(gpu: VirtualGpu) -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(F.softmax(torch.ones(2), 0).tolist()))
    thread.start()
    thread.join()
    assert found == [[0.5, 0.5]]
