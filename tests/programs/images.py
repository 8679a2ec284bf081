"""Models that read images."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.programs.harness import Made, Memory, program
from torch import Tensor, nn


def labelled(count: int, size: int, side: int, classes: int = 10):
    """Batches of random images with labels, each made when it is wanted."""
    for _ in range(count):
        yield torch.randn(size, 3, side, side), torch.randint(0, classes, (size,))


def classification(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class Vit(nn.Module):
    def __init__(self, side: int = 32, patch: int = 4, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    Attention(width, 4),
                    nn.LayerNorm(width),
                    nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)),
                ]
            )
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.places
        for norm_1, attention, norm_2, mlp in self.blocks:
            x = x + attention(norm_1(x))
            x = x + mlp(norm_2(x))
        return self.head(self.norm(x)[:, 0])


@program("ViT", "compile", "train_step")
def vit(memory: Memory) -> Made:
    model = Vit()
    step = memory.step(model, classification, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for images, labels in labelled(3, 16, 32):
        yield step(images, labels)
    yield model


class ConvNext(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 4, 4)
        self.deep = nn.ModuleList(nn.Conv2d(width, width, 7, padding=3, groups=width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-6) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.scales = nn.ParameterList(1e-6 * torch.ones(width) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for deep, norm, wide, narrow, scale in zip(
            self.deep, self.norms, self.wide, self.narrow, self.scales, strict=True
        ):
            y = norm(deep(x).permute(0, 2, 3, 1))
            y = scale * narrow(F.gelu(wide(y)))
            x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean((-2, -1)))


@program("ConvNeXt, label smoothing, cosine schedule", "compile")
def convnext(memory: Memory) -> Made:
    model = ConvNext()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    model = memory.compile(model)
    for images, labels in labelled(3, 16, 64):
        loss = criterion(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        yield loss, model


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
    )  # fmt: skip


class Unet(nn.Module):
    def __init__(self, width: int = 8, classes: int = 4) -> None:
        super().__init__()
        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.grow = nn.ModuleList(
            [nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)]
        )
        self.up = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down[0](x)
        b = self.down[1](F.max_pool2d(a, 2))
        x = self.down[2](F.max_pool2d(b, 2))
        for grow, up, skip in zip(self.grow, self.up, (b, a), strict=True):
            x = up(torch.cat([skip, grow(x)], dim=1))
        return self.head(x)


def dice_and_entropy(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    logits = model(images)
    chosen = F.one_hot(masks, logits.shape[1]).permute(0, 3, 1, 2).float()
    shares = logits.softmax(dim=1)
    dice = (2 * (shares * chosen).sum((0, 2, 3)) + 1) / ((shares + chosen).sum((0, 2, 3)) + 1)
    return F.cross_entropy(logits, masks) + 1 - dice.mean()


@program("U-Net with cross entropy and Dice loss", "train_step")
def unet(memory: Memory) -> Made:
    model = Unet()
    step = memory.step(model, dice_and_entropy, torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9))
    for _ in range(3):
        yield step(torch.rand(4, 3, 64, 64), torch.randint(0, 4, (4, 64, 64)))
    yield model


class Segmenter(nn.Module):
    """Features at an eighth of the side, made larger again."""

    def __init__(self, width: int = 32, classes: int = 5) -> None:
        super().__init__()
        steps = [(3, width), (width, width), (width, 2 * width)]
        self.features = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(i, o, 3, 2, 1), nn.BatchNorm2d(o), nn.ReLU()) for i, o in steps)
        )
        self.wider = nn.Conv2d(2 * width, 2 * width, 3, padding=2, dilation=2)
        self.head = nn.Conv2d(2 * width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.head(torch.relu(self.wider(self.features(images))))
        return F.interpolate(x, size=images.shape[-2:], mode="bilinear", align_corners=False)


def segmentation_loss(model: nn.Module, images: Tensor, masks: Tensor) -> Tensor:
    return F.cross_entropy(model(images), masks, ignore_index=255)


@program("segmentation with bilinear upsampling and ignored pixels", "compile", "train_step")
def segmentation(memory: Memory) -> Made:
    model = Segmenter()
    step = memory.step(model, segmentation_loss, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    for _ in range(3):
        masks = torch.randint(0, 5, (8, 64, 64))
        masks[:, :4] = 255
        yield step(torch.rand(8, 3, 64, 64), masks)
    yield model


@program("super-resolution: PixelShuffle, loss outside of the model")
def super_resolution(memory: Memory) -> Made:
    model = nn.Sequential(
        nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 9, 3, padding=1), nn.PixelShuffle(3),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    model = memory.compile(model)
    for _ in range(3):
        small, large = torch.rand(8, 1, 48, 48), torch.rand(8, 1, 144, 144)
        optimizer.zero_grad()
        loss = criterion(model(small), large)
        loss.backward()
        optimizer.step()
        yield loss, model


@program("CNN in channels-last")
def channels_last(memory: Memory) -> Made:
    model = nn.Sequential(
        double(3, 16), nn.MaxPool2d(2), double(16, 32), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
    )
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    model = memory.compile(model)
    for _ in range(3):
        images = torch.randn(16, 3, 32, 32).to(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (16,))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        yield loss, model


class WithHeads(nn.Module):
    """Auxiliary classifiers half-way, as in GoogLeNet; in evaluation the last alone."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.stages = nn.ModuleList(double(3 if i == 0 else width, width) for i in range(3))
        self.heads = nn.ModuleList(nn.Linear(width, 10) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for stage, head in zip(self.stages, self.heads, strict=True):
            x = stage(x)
            found.append(head(x.mean((2, 3))))
            x = F.avg_pool2d(x, 2)
        return found if self.training else found[-1:]


@program("deep supervision: three heads, three losses")
def deep_supervision(memory: Memory) -> Made:
    model = WithHeads()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model = memory.compile(model)
    for images, labels in labelled(3, 16, 32):
        *others, last = (F.cross_entropy(logits, labels) for logits in model(images))
        loss = last + 0.3 * sum(others)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model


@program("evaluation between epochs, and a last partial batch")
def evaluation_and_partial_batches(memory: Memory) -> Made:
    model = nn.Sequential(
        double(3, 16), nn.MaxPool2d(2), double(16, 16), nn.Flatten(), nn.Dropout(), nn.Linear(16 * 256, 10)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    model = memory.compile(model)
    for _ in range(2):
        model.train()
        for size in (16, 16, 5):
            ((images, labels),) = labelled(1, size, 32)
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        right = 0
        with torch.no_grad():
            for images, labels in labelled(2, 24, 32):
                right += (model(images).argmax(dim=1) == labels).sum().item()
        scheduler.step()
        yield loss, right, model


@program("BatchNorm(momentum=None): a plain average of all batches")
def cumulative_batch_norm(memory: Memory) -> Made:
    layers: list[nn.Module] = []
    for inputs in (3, 16, 16):
        layers += [nn.Conv2d(inputs, 16, 3, padding=1), nn.BatchNorm2d(16, momentum=None), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model = memory.compile(model)
    for images, labels in labelled(3, 16, 32):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss, model
