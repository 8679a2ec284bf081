"""Medical images, in three dimensions."""

from __future__ import annotations

import torch
from torch import Tensor

from .job import job
from .ways import Steps, Way

MONAI = ("monai",)


def volumes(size: int = 32, steps: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches of volumes, and which of their voxels are of interest."""
    shape = 2, 1, size, size, size
    return [(torch.randn(shape), (torch.randn(shape) > 0).long()) for _ in range(steps)]


@job("U-Net of MONAI with its Dice loss", needs=MONAI)
def monai_unet(way: Way) -> Steps:
    from monai.losses import DiceLoss
    from monai.networks.nets import UNet

    dice = DiceLoss(to_onehot_y=True, softmax=True)
    model = UNet(3, 1, 2, channels=(8, 16, 32), strides=(2, 2))
    return way.train(model, lambda model, x, labels: dice(model(x), labels), volumes())


@job("SwinUNETR of MONAI with Dice and cross entropy", needs=MONAI)
def swin_unetr(way: Way) -> Steps:
    from monai.losses import DiceCELoss
    from monai.networks.nets import SwinUNETR

    dice = DiceCELoss(to_onehot_y=True, softmax=True)
    group = "group", {"num_groups": 4}
    model = SwinUNETR(1, 2, feature_size=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), norm_name=group)
    return way.train(model, lambda model, x, labels: dice(model(x), labels), volumes())


@job("SegResNet of MONAI, the loss with a focal part", needs=MONAI)
def seg_res_net(way: Way) -> Steps:
    from monai.losses import DiceFocalLoss
    from monai.networks.nets import SegResNet

    loss = DiceFocalLoss(to_onehot_y=True, softmax=True)
    model = SegResNet(
        init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 1), blocks_up=(1,), dropout_prob=0.1
    )
    return way.train(model, lambda model, x, labels: loss(model(x), labels), volumes(16))
