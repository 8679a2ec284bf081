"""A small residual network in mixed precision and channels-last, with what people add to be fast and safe."""
# ruff: noqa: PLW2901, T201

import time

import torch
from torch import nn
from torch.amp import GradScaler, autocast
from torch.utils.data import DataLoader, Dataset

torch.backends.cudnn.benchmark = True
torch.backends.cuda.matmul.allow_tf32 = True


class Pictures(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        image = torch.randn(3, 32, 32)
        if torch.rand(()) < 0.5:  # the host's values are real
            image = image.flip(-1)
        return image, index % 10


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        return torch.relu_(self.body(x) + x)


def build():
    return nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), Block(64), nn.MaxPool2d(2), Block(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip


class AverageMeter:
    def __init__(self, name, fmt=":.4e"):
        self.name, self.fmt, self.val, self.sum, self.count = name, fmt, 0, 0, 0

    def update(self, value, n=1):
        self.val = value
        self.sum += value * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1, 5)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / target.size(0)) for k in topk]


def main():
    device = "cuda"
    model = build().to(device, memory_format=torch.channels_last)
    model = torch.compile(model, mode="max-autotune")
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
    scaler = GradScaler("cuda")
    loader = DataLoader(Pictures(640), batch_size=64, shuffle=True, num_workers=2, prefetch_factor=4, drop_last=True)
    losses, top1, top5 = AverageMeter("Loss"), AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for epoch in range(2):
        for step, (images, labels) in enumerate(loader):
            begin.record()
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.cuda(non_blocking=True)
            with autocast("cuda"):
                output = model(images)
                loss = criterion(output, labels)
            if not torch.isfinite(loss):
                raise RuntimeError(f"loss is {loss.item()}")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scale <= scaler.get_scale():  # no step was skipped
                scheduler.step()
            optimizer.zero_grad(set_to_none=True)
            acc1, acc5 = accuracy(output, labels)
            losses.update(loss.item(), images.size(0))
            top1.update(acc1[0], images.size(0))
            top5.update(acc5[0].item(), images.size(0))
            end.record()
            torch.cuda.synchronize()
            rate = images.size(0) / begin.elapsed_time(end)
            print(f"{epoch} {step} {losses} {top5} norm {norm:.2f} lr {scheduler.get_last_lr()[0]:.4f} {rate:.0f}/ms")
            print(f"memory {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB, {time.time():.0f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
