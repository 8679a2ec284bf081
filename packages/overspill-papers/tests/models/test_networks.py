"""The networks that papers measured are the published ones; tests/models has what holds for all models."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_builtin_models import check_image_size, convolution, convolutions, lstm, normalised, on_meta
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from overspill.core.errors import RequestError
from overspill.models import load
from overspill.models.step import TrainingStep

OVERFEAT = sum(
    convolution(*layer)
    for layer in [
        *[(3, 96, 121), (96, 256, 25), (256, 512, 9), (512, 1024, 9), (1024, 1024, 9)],
        *[(1024, 3072, 36), (3072, 4096, 1), (4096, 1000, 1)],
    ]
)
DEEPLAB = (
    44_549_160  # ResNet-101, less its classifier
    - convolution(2048, 1000, 1)
    + 2 * normalised(2048, 256, 1)
    + 3 * normalised(2048, 256, 9)
    + normalised(5 * 256, 256, 1)
    + normalised(256, 48, 1)
    + normalised(304, 256, 9)
    + normalised(256, 256, 9)
    + convolution(256, 21, 1)
)
SEQ2SEQ = 3 * 50_000 * 1000 + lstm(1000, 1000, 4) + lstm(2000, 1000, 4) + 3 * 1000 * 1000
DISCRIMINATOR = sum(convolution(*layer, 16) for layer in [(39, 64), (64, 128), (128, 256), (256, 512), (512, 1)])


@pytest.mark.short(
    "inception-v3-23834568",
    "densenet121-7978856",
    "seq2seq-221064000",
    "overfeat-145920872",
    "googlenet-6998552",
    "googlenet-aux-13378280",
    "deeplabv3plus-59344309",
    "pix2pixhd-190951558",
)
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        # torchvision 0.28's table of weights
        ("inception-v3", 23_834_568),
        ("inception-v3-aux", 27_161_264),
        ("densenet121", 7_978_856),
        ("densenet161", 28_681_000),
        ("densenet169", 14_149_480),
        ("densenet201", 20_013_928),
        # timm 1.0's of the same networks: 42.68 M and 55.84 M
        ("inception-v4", 42_679_816),
        ("inception-resnet-v2", 55_843_464),
        # no published count: the sum over the layers that the paper gives
        ("seq2seq", SEQ2SEQ),
        # OverFeat's Table 4, fast model: 145 M; convnet-benchmarks's layers
        ("overfeat", OVERFEAT),
        # Caffe's bvlc_googlenet, without and with its auxiliary classifiers
        ("googlenet", 6_998_552),
        ("googlenet-aux", 13_378_280),
        ("deeplabv3plus", DEEPLAB),
        # NVIDIA/pix2pixHD's global generator, 182 546 755, and three discriminators of 39 channels in
        ("pix2pixhd", 182_546_755 + 3 * DISCRIMINATOR),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in on_meta(name).parameters()) == parameters


@pytest.mark.short("googlenet-32", "overfeat-71")
@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        *[("googlenet", 32), ("overfeat", 71), ("overfeat", 256), ("deeplabv3plus", 32), ("deeplabv3plus", 250)],
        ("inception-v3", 75),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("densenet121", 32),
                ("inception-v3-aux", 224),
                ("inception-v4", 224),
                ("inception-resnet-v2", 75),
            )
        ),
    ],
)
def test_another_image_size_changes_the_images_and_not_the_parameters(name: str, image_size: int) -> None:
    check_image_size(name, image_size)


@pytest.mark.parametrize(
    ("name", "side", "words"),
    [
        ("overfeat", 70, ["image_size=70", "overfeat", "71"]),
        ("pix2pixhd", 100, ["image_size=100", "pix2pixhd", "multiple of 16"]),
        ("inception-v4", 74, ["image_size=74", "inception-v4", "75"]),
    ],
)
def test_a_size_that_the_model_cannot_take_is_refused(name: str, side: int, words: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        load(name, image_size=side)
    assert all(word in str(caught.value) for word in words)


def test_response_norm_is_pytorchs() -> None:
    from overspill_papers.models.googlenet import ResponseNorm

    x = torch.randn(2, 12, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(ResponseNorm()(x), nn.LocalResponseNorm(5)(x))


@pytest.mark.parametrize(("have", "want"), [(1, 5), (3, 9), (33, 129), (5, 12)])
def test_bilinear_upsampling_is_pytorchs(have: int, want: int) -> None:
    from overspill_papers.models.deeplab import Bilinear

    x = torch.randn(2, 3, have, have)
    expected = nn.functional.interpolate(x, size=(want, want), mode="bilinear", align_corners=True)
    torch.testing.assert_close(Bilinear(have, want)(x), expected)


@pytest.mark.long
def test_the_last_stage_of_deeplab_is_atrous_and_keeps_the_side() -> None:
    with FakeTensorMode():
        module = load("deeplabv3plus").module
        assert module.low(torch.empty(1, 3, 513, 513)).shape == (1, 256, 129, 129)
        assert module.eval().high(torch.empty(1, 256, 129, 129)).shape == (1, 256, 33, 33)
    assert [layer.dilation[0] for layer in convolutions(module)].count(2) == 3


@pytest.mark.parametrize("width", [1, 3])
def test_reflection_padding_is_pytorchs(width: int) -> None:
    from overspill_papers.models.pix2pixhd import ReflectionPad

    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(ReflectionPad(width)(x), nn.ReflectionPad2d(width)(x))


def test_one_backward_of_pix2pixhd_gives_each_side_the_gradient_of_its_own_loss() -> None:
    from overspill_papers.models import pix2pixhd

    torch.manual_seed(0)
    job = load("pix2pixhd", small=True)
    labels, images = job.make_batch(2)
    job.loss(job.module, labels, images).backward()
    module = job.module
    assert isinstance(module, pix2pixhd.Pix2PixHd)
    together = {name: parameter.grad for name, parameter in module.named_parameters()}

    def judged(generated: torch.Tensor) -> list[pix2pixhd.Features]:
        return module._features(labels, generated, learns=True)

    generator = list(module.generator.parameters())
    discriminators = list(module.discriminators.parameters())
    generated = module.generator(labels)
    for_discriminators = sum(
        0.5 * ((real[-1] - 1).square().mean() + fake[-1].square().mean())
        for real, fake in zip(judged(images), judged(generated), strict=True)
    )
    for_generator = sum(
        (fake[-1] - 1).square().mean()
        + 10 * sum((a - b.detach()).abs().mean() for a, b in zip(fake[:-1], real[:-1], strict=True))
        for real, fake in zip(judged(images), judged(generated), strict=True)
    )
    apart = [
        *torch.autograd.grad(for_generator, generator, retain_graph=True),
        *torch.autograd.grad(for_discriminators, discriminators),
    ]
    torch.testing.assert_close(list(together.values()), apart, rtol=1e-3, atol=1e-5)


def test_a_patch_of_the_discriminator_is_70_pixels() -> None:
    from overspill_papers.models.pix2pixhd import Discriminator

    field, stride = 1, 1
    for layer in convolutions(Discriminator(4, 2)):
        field += (layer.kernel_size[0] - 1) * stride
        stride *= layer.stride[0]
    assert field == 70


def test_the_images_of_pix2pixhd_are_twice_as_wide_as_high() -> None:
    labels, images = load("pix2pixhd", small=True, image_size=48).make_batch(2)
    assert labels.shape == (2, 6, 48, 96)
    assert images.shape == (2, 3, 48, 96)
    assert labels[:, :5].sum(1).eq(1).all()


@pytest.mark.parametrize("name", ["deeplabv3plus", "inception-v3-aux"])
def test_batch_norm_refuses_a_batch_of_one_where_every_image_has_maps_of_one_pixel(name: str) -> None:
    with pytest.raises(RequestError, match=r"batch of 2$"):
        load(name, small=True, image_size=256).make_batch(1)


@pytest.mark.long
@pytest.mark.parametrize("name", ["googlenet-aux", "inception-v3-aux"])
def test_a_small_model_compiles_into_one_graph_with_the_same_loss(name: str) -> None:
    """The others train compiled, in one graph, in tests/runtime/test_models.py."""
    job = load(name, small=True)
    step = TrainingStep(job)
    compiled = torch.compile(TrainingStep(job), fullgraph=True, dynamic=False, backend="aot_eager")
    batch = job.make_batch(2)
    torch.manual_seed(0)
    expected = step(*batch)
    torch.manual_seed(0)
    loss = compiled(*batch)
    loss.backward()
    assert torch.equal(loss, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "channels"), [("inception-v3", 2048), pytest.param("inception-v4", 1536, marks=pytest.mark.long)]
)
def test_an_inception_ends_in_maps_of_the_published_size(name: str, channels: int) -> None:
    with FakeTensorMode():
        module = load(name).module.eval()
        middle = module.before(torch.empty(1, 3, 299, 299))
        assert middle.shape[2:] == (17, 17)
        assert module.after(middle).shape == (1, channels, 8, 8)


def test_the_translator_attends_to_the_whole_source_and_not_ahead_in_the_target() -> None:
    module = load("seq2seq", small=True).module.eval()
    source, target = torch.randint(61, (1, 6)), torch.randint(61, (1, 6))
    before = module(source, target)
    for tokens, same in ((source, 0), (target, 4)):
        changed = tokens.clone()
        changed[0, 4] = (changed[0, 4] + 1) % 61
        after = module(changed, target) if tokens is source else module(source, changed)
        torch.testing.assert_close(before[:, :same], after[:, :same])
        assert all(not torch.equal(before[:, step], after[:, step]) for step in range(same, 6))


def test_a_sequence_length_changes_the_tokens_of_the_translator() -> None:
    *_, tokens, targets = load("seq2seq", small=True, seq_len=17).make_batch(2)
    assert tokens.shape == targets.shape == (2, 17)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
