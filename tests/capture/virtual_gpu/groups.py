"""Process groups, and small models for them."""

import sys
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

WIDTH, LAYERS, GPUS = 512, 6, 4
LINEAR_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


@contextmanager
def callers_own(backend, store, gpus=1):
    """A process group that is made outside of any capture."""
    hook = sys.excepthook
    dist.init_process_group(backend, store=store, rank=0, world_size=gpus)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook  # torch leaves it wrapped


def linears():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def steps(recorder, model, optimizer, inputs, iterations=3):
    for _ in range(iterations):
        recorder.start_iteration()
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
