"""The built-in networks are the published ones, train, compile and trace without memory."""

from __future__ import annotations

import math

import pytest
import torch
from tests.models.variants import OTHERS_LONG, others_long
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.models import BuiltModel, load
from overspill.models.step import TrainingStep

pytestmark = pytest.mark.usefixtures("forget_compiled_code")


def load_or_skip(name: str, *, small: bool = False) -> BuiltModel:
    if name.startswith("bert"):
        pytest.importorskip("transformers")
    return load(name, small=small)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return load_or_skip(name).module


def convolutions(module: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]


def convolution(channels: int, width: int, area: int) -> int:
    return channels * width * area + width


def normalised(channels: int, width: int, area: int) -> int:
    """A convolution without bias and a batch norm."""
    return channels * width * area + 2 * width


def lstm(inputs: int, width: int, layers: int) -> int:
    """Four gates that read input and state, with two biases each as in PyTorch."""
    return sum(4 * width * ((width if layer else inputs) + width + 2) for layer in range(layers))


def check_image_size(name: str, image_size: int) -> None:
    """Fails unless the model reads images of that size, and has the parameters that it has without it."""
    with FakeTensorMode():
        job = load(name, image_size=image_size)
        images, labels = job.make_batch(2)
        loss = job.loss(job.module, images, labels)
    assert images.shape == (2, 3, image_size, image_size)
    assert loss.shape == ()
    assert [p.shape for p in job.module.parameters()] == [p.shape for p in on_meta(name).parameters()]


LSTM = 10_000 * 650 + lstm(650, 650, 2) + 650 * 10_000 + 10_000


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # torchvision 0.28's table of weights
        ("alexnet", 61_100_840),
        ("vgg-a", 132_863_336),
        ("vgg-b", 133_047_848),
        ("vgg-d", 138_357_544),
        ("vgg-e", 143_667_240),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("vgg16-vdnn", 143_667_240),
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        # configuration D with the last of three convolutions 1x1 in groups three to five
        ("vgg-c", 138_357_544 - 8 * (256 * 256 + 2 * 512 * 512)),
        # He et al. 2015, Table 6: 0.46 M
        ("resnet32-cifar", 464_154),
        # 31 030 658 of the published one, which reads one channel rather than three
        ("unet", 31_030_658 + 2 * 9 * 64),
        # no published counts: sums over the layers that the papers give
        ("lstm", LSTM),
        # transformers' GPT2Config() and BertConfig()
        ("gpt2", 124_439_808),
        ("bert-base", 109_514_298),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == parameters


@pytest.mark.short("vgg-a-8", "vgg-c-13", "vgg16-13", "vgg16-vdnn-16", "vgg116-116")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *[("vgg-a", 8), ("vgg-b", 10), ("vgg-c", 13), ("vgg-d", 13), ("vgg-e", 16)],
        *[("vgg16", 13), ("vgg19", 16), ("vgg16-vdnn", 16)],
        *[("vgg116", 116), ("vgg216", 216), ("vgg316", 316), ("vgg416", 416)],
    ],
)
def test_each_vgg_has_the_convolutions_of_its_configuration(name: str, count: int) -> None:
    assert len(convolutions(on_meta(name))) == count


def test_each_hundred_of_a_deep_vgg_adds_twenty_convolutions_to_every_group() -> None:
    widths = [layer.out_channels for layer in convolutions(on_meta("vgg216"))]
    assert [widths.count(width) for width in (64, 128, 256, 512)] == [42, 42, 44, 88]


@pytest.mark.parametrize(
    ("alias", "name"),
    [("vgg11", "vgg-a"), ("vgg13", "vgg-b"), ("vgg16", "vgg-d"), ("vgg19", "vgg-e"), ("vgg16-vdnn", "vgg-e")],
)
def test_an_alias_is_the_network_it_stands_for_under_its_own_name(alias: str, name: str) -> None:
    with torch.device("meta"):
        job, original = load(alias), load(name)
    assert job.name == alias
    assert str(job.module) == str(original.module)


@pytest.mark.parametrize("name", OTHERS_LONG)
def test_a_small_model_is_small_and_trains_on_batches_that_follow_the_seed(name: str) -> None:
    torch.manual_seed(0)
    job = load_or_skip(name, small=True)
    assert len(convolutions(job.module)) <= 60
    assert sum(parameter.numel() for parameter in job.module.parameters()) < 1_000_000
    torch.manual_seed(7)
    batch = job.make_batch(4)
    torch.manual_seed(7)
    assert all(map(torch.equal, batch, job.make_batch(4)))
    assert all(tensor.shape[0] == 4 and tensor.device.type == "cpu" for tensor in batch)
    step = TrainingStep(job)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = step(*batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == 3
    assert all(parameter.grad is not None for parameter in step.parameters())


@pytest.mark.parametrize("name", others_long("alexnet", "resnet18", "unet", "gpt2"))
def test_a_full_model_is_built_and_trained_under_fake_tensors(name: str) -> None:
    with FakeTensorMode():
        job = load_or_skip(name)
        loss = TrainingStep(job)(*job.make_batch(8))
        loss.backward()
    assert loss.shape == ()


@pytest.mark.parametrize(("name", "image_size"), [("alexnet", 63), ("alexnet", 256), ("vgg-a", 32), ("vgg-a", 300)])
def test_another_image_size_changes_the_images_and_not_the_parameters(name: str, image_size: int) -> None:
    check_image_size(name, image_size)


@pytest.mark.parametrize("name", ["gpt2", "lstm"])
def test_a_sequence_length_changes_the_tokens(name: str) -> None:
    *_, tokens, targets = load(name, small=True, seq_len=17).make_batch(2)
    assert tokens.shape == targets.shape == (2, 17)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


@pytest.mark.parametrize(("name", "vocabulary"), [("gpt2", 211), ("lstm", 97)])
def test_a_language_model_predicts_without_looking_ahead(name: str, vocabulary: int) -> None:
    module = load(name, small=True).module.eval()
    tokens = torch.randint(vocabulary, (1, 12))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % vocabulary
    before, after = module(tokens), module(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8])
    assert not torch.equal(before[:, 8:], after[:, 8:])


def test_an_lstm_stack_is_pytorchs() -> None:
    from overspill.models.lstm import LstmStack

    stack = LstmStack(5, 7, 2, dropout=0.0)
    whole = nn.LSTM(5, 7, 2, batch_first=True)
    for layer, cell in enumerate(stack.cells):
        for name, parameter in cell.named_parameters():
            getattr(whole, f"{name}_l{layer}").data.copy_(parameter.data)
    x = torch.randn(3, 4, 5)
    states, outputs = stack.start(x[:, 0]), []
    for step in x.unbind(1):
        states = stack(step, states)
        outputs.append(states[-1][0])
    torch.testing.assert_close(torch.stack(outputs, 1), whole(x)[0])


def test_the_small_bert_masks_at_least_one_token_of_every_row() -> None:
    pytest.importorskip("transformers")
    input_ids, labels = load("bert-base", small=True).make_batch(8)
    masked = labels != -100
    assert masked.any(1).all()
    assert (input_ids[masked] == 103).all()
