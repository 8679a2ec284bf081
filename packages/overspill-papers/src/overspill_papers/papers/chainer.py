"""A step as Chainer 3 runs it, in the blocks that it requests from its memory pool.

Function nodes hold the tensors that backward reads until the whole graph of variables is dropped, after backward.
Gradients of variables are freed at once after use. Each call of cuDNN's convolutions takes a workspace of the allowed
size, by default 8 MiB, whatever the algorithm needs. Sizes are multiples of 512 bytes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from overspill.core import Block, Graph, LayerType, Op, Phase, Schedule, TensorKind, Trace
from overspill.placement.simulated_device import round_up
from overspill.simulate import trace_of
from overspill_papers.placement.allocators.chainer import STEP_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from overspill import models

WORKSPACE_BYTES = 8 << 20
"""The default result of `chainer.cuda.get_max_workspace_size`."""
HELD = (TensorKind.PARAMETER, TensorKind.BUFFER, TensorKind.GRADIENT, TensorKind.OPTIMIZER_STATE)
"""The tensors in use before the step: Chainer makes a parameter's gradient once, and clears it in place."""


Parts = tuple["nn.Module", "Callable[[int], tuple[Tensor, ...]]", "Callable[..., Tensor]"]


def alexnet() -> Parts:
    """Return AlexNet of Chainer's example `imagenet/alex.py`.

    It is one tower with response normalisation, on images of 227 x 227.
    """
    from torch import nn  # noqa: PLC0415  # what only lists claims does without
    from torch.nn import functional as F  # noqa: PLC0415

    from overspill.models.vision import image_batches  # noqa: PLC0415

    # Five convolutions, then three linear layers.
    module = nn.Sequential(
        nn.Conv2d(3, 96, 11, stride=4), nn.ReLU(), _response_norm(), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, padding=2), nn.ReLU(), _response_norm(), nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(),
        nn.Linear(4096, 1000),
    )  # fmt: skip
    return module, image_batches(227, 1000), lambda logits, _images, labels: F.cross_entropy(logits, labels)


def googlenet() -> Parts:
    """Return Chainer's example `imagenet/googlenet.py`, with its two auxiliary classifiers."""
    from overspill import models  # noqa: PLC0415
    from overspill_papers.models.googlenet import ResponseNorm  # noqa: PLC0415

    job = models.load("googlenet-aux")
    stem = job.module.stem
    for name, child in stem.named_children():
        if isinstance(child, ResponseNorm):
            setattr(stem, name, _response_norm())
    return job.module, job.make_batch, _whole_loss(job)


def _whole_loss(job: models.BuiltModel) -> Callable[..., Tensor]:
    """Return the loss of already computed outputs."""

    def loss(outputs: object, _images: Tensor, labels: Tensor) -> Tensor:
        return job.loss(lambda _: outputs, _images, labels)

    return loss


def _response_norm() -> nn.Module:
    """Return a layer with the maps of Chainer's response normalisation, but not its numbers.

    The maps are its result, and the scale that its backward reads.
    """
    from torch import nn  # noqa: PLC0415

    class Maps(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sigmoid()

    return Maps()


def as_chainer(graph: Graph) -> Graph:
    """Return `graph` with Chainer's workspaces: one for each convolution, of one fixed size."""
    return replace(graph, ops=tuple(map(_with_workspace, graph.ops)))


def _with_workspace(op: Op) -> Op:
    return replace(op, workspace_bytes=WORKSPACE_BYTES if op.layer_type is LayerType.CONV else 0, algorithms=())


def inference_trace(graph: Graph) -> Trace:
    """Return the blocks of a forward pass, each freed after its last use; none is kept for backward."""
    forward = [op for op in graph.ops if op.phase is Phase.FORWARD]
    blocks = [(op.id, op.id + 1, op.workspace_bytes, "workspace") for op in forward]
    for tensor in graph.tensors:
        uses = [op.id for op in forward if tensor.id in op.reads or tensor.id in op.writes]
        if uses and (not tensor.persistent or tensor.kind is TensorKind.INPUT):
            made = 0 if tensor.kind is TensorKind.INPUT else uses[0]
            blocks.append((made, uses[-1] + 1, tensor.nbytes, tensor.name))
    return _in_steps(blocks)


def training_trace(graph: Graph, schedule: Schedule) -> Trace:
    """Return the blocks of a training step.

    `schedule` keeps activations to the end of backward.
    """
    aside = {t.name for t in graph.tensors if t.kind in (*HELD, TensorKind.WORKSPACE)}  # the latter is our handles
    blocks = trace_of(graph, schedule).blocks
    return _in_steps([(b.start, b.end, b.nbytes, b.name) for b in blocks if b.name not in aside])


def held_bytes(graph: Graph, *, training: bool) -> int:
    """Return the bytes that are allocated before the step.

    These are parameters, and in training their gradients and the optimizer's state.
    """
    kinds = HELD if training else (TensorKind.PARAMETER, TensorKind.BUFFER)
    return sum(round_up(t.nbytes, STEP_BYTES) for t in graph.tensors if t.kind in kinds)


def _in_steps(blocks: list[tuple[int, int, int, str]]) -> Trace:
    sized = sorted((start, end, round_up(nbytes, STEP_BYTES), name) for start, end, nbytes, name in blocks if nbytes)
    return Trace(tuple(Block(i, *block) for i, block in enumerate(sized)))
