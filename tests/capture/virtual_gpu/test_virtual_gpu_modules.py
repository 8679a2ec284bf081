"""Modules on the virtual GPU: moved, converted, copied, loaded, lazy, tied and parametrized."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any, Self

import pytest
import torch
from tests.capture.virtual_gpu.virtual import CPU, batch, mlp
from torch import Tensor, nn

from overspill.capture.virtual_gpu.gpu import VirtualGpu
from overspill.capture.virtual_gpu.record import record
from overspill.core.errors import RequestError


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
    with pytest.raises(RequestError, match=r"Linear.*deep copy"):
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


class Packed(nn.Parameter):
    def __new__(cls, data: Tensor, requires_grad: bool = False) -> Self:
        return Tensor._make_subclass(cls, data, requires_grad)


def test_parameters_made_by_their_class_again_or_by_one_of_a_library(gpu: VirtualGpu) -> None:
    weight = nn.Parameter(torch.randn(4))
    # accelerate's init_empty_weights
    assert type(weight)(weight.to("meta"), **weight.__dict__ | {"requires_grad": False}).device.type == "meta"
    # bitsandbytes' Params4bit
    layer = nn.Linear(4, 4)
    layer.weight = Packed(layer.weight.data)
    layer.to("cuda")
    assert isinstance(layer.weight, Packed)
    assert layer.weight.is_cuda
    assert not layer.weight.requires_grad


@pytest.mark.long
def test_a_model_of_transformers_is_not_traced_and_so_has_no_mask(gpu: VirtualGpu) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 64,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).cuda()
    model(input_ids=torch.randint(64, (2, 8)).cuda()).logits.sum().backward()
    names = {op.name for op in gpu.recorder.recording().ops}
    assert "where" not in names
    assert {name for name in names if "attention" in name}
