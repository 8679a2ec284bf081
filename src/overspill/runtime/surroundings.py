"""Fixed device bytes of a training step outside one captured graph.

They belong to the optimizer, other parameters, and a loss outside the model.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Surroundings
from overspill.capture.compiled.joint import JointGraph, storages
from overspill.core import TensorKind
from overspill.core.units import parse_bytes
from overspill.job import Job
from overspill.pytorch.storages import storage_key

from .ddp import bucket_bytes
from .optimizers import find_optimizers, optimizer_needs
from .step.inner_tensors import bytes_of


def surroundings_of(
    joint: JointGraph,
    here: Sequence[nn.Parameter],
    parameters: Iterable[Tensor],
    optimizers: Sequence[Optimizer] | None,
    reserve: str | float | None = None,
    *,
    retained_bytes: int = 0,
    accumulates: bool = False,
    clips: bool = False,
    beside: Sequence[int] = (),
    ends_in_loss: bool = False,
    trained: Container[int] = (),
    between_bytes: int = 0,
) -> Surroundings:
    """Return the device bytes outside the graph `joint` during a training step.

    The graph reads the parameters `here`, some of the model's `parameters`.

    - `optimizers`: those that step on the parameters; None: found among those that exist.
    - `reserve`: bytes for a loss outside the model; None: those of `LossOutside`.
    - `retained_bytes`: bytes that other graphs of the model leave on the device.
    - `clips`: whether gradients are clipped by their norm before the update.
    - `beside`: bytes of each batch on the device other than the model's inputs.
    - `ends_in_loss`: whether no loss outside is made from outputs that the graph makes into a loss itself.
    - `trained`: as in `optimizer_needs`.
    - `between_bytes`: bytes that other code of the model takes between forward and backward.
    """
    loss = (
        LossOutside.of(joint, beside, ends_in_loss=ends_in_loss)
        if reserve is None
        else LossOutside(parse_bytes(reserve))
    )
    # All parameters, those of the optimizers included.
    known = {id(p): p for p in (*parameters, *here)}
    stepping = optimizers if optimizers is not None else find_optimizers(list(known.values()))
    known |= {id(p): p for o in stepping for group in o.param_groups for p in group["params"]}
    needs = optimizer_needs(stepping, trained)
    # Those that the graph does not read count as bytes elsewhere.
    inside = {id(p) for p in here}
    outside = [p for key, p in known.items() if key not in inside]
    return Surroundings(
        optimizer_state_bytes=needs.state_bytes,
        update_bytes=needs.update_bytes,
        update_moved_bytes=needs.moved_bytes,
        reserved_bytes=max(loss.workspace_bytes, between_bytes),
        previous_bytes=loss.previous_bytes,
        accumulates=accumulates,
        clip_bytes=_norm_bytes(p for o in stepping for group in o.param_groups for p in group["params"])
        if clips
        else 0,
        outside_graph=(
            (TensorKind.PARAMETER, sum(map(bytes_of, outside))),
            (TensorKind.GRADIENT, sum(p.nbytes for p in outside if p.requires_grad)),
            (TensorKind.ACTIVATION, retained_bytes),
            (TensorKind.COMMUNICATION, bucket_bytes()),
            (TensorKind.INPUT, loss.targets_bytes),
            (TensorKind.TEMPORARY, loss.held_bytes),
        ),
    )


def surroundings_of_job(
    job: Job,
    joint: JointGraph,
    here: Sequence[nn.Parameter],
    *,
    parameters: Iterable[Tensor],
    optimizer: Optimizer,
    reserve: str | float | None,
) -> Surroundings:
    """Return the fixed device bytes outside the graph of a job's model and loss."""
    return surroundings_of(
        joint, here, parameters, [optimizer], reserve, accumulates=job.keeps_gradients, clips=job.clips
    )


def _norm_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that clip_grad_norm_ holds at once.

    These are the norm of each gradient, their stack, and the scalars made from them.
    """
    return 2 * 4 * sum(p.requires_grad for p in parameters) + 64


@dataclass(frozen=True)
class LossOutside:
    """Bytes for a loss computed outside the graph; all 0 if the graph returns its own."""

    workspace_bytes: int = 0
    """Bytes between forward and backward."""
    targets_bytes: int = 0
    """Bytes of batches other than the model's inputs, throughout."""
    held_bytes: int = 0
    """Bytes of elements that the loss keeps throughout, as a mean does that PyTorch computes in place."""
    previous_bytes: int = 0
    """Bytes of outputs of the step before, which a training loop holds until the model returns."""

    @classmethod
    def of(cls, joint: JointGraph, beside: Sequence[int], *, ends_in_loss: bool = False) -> LossOutside:
        """Return the bytes for a loss of the graph's differentiable outputs.

        With `ends_in_loss`, outputs that the graph makes into a loss itself do not count. Batches of `beside` bytes are
        on the device. The unit is an output in float32. A cross-entropy saves one unit, its gradient goes through
        another and becomes a third, with one or two numbers per row. A loss of each element (if a target is as large)
        has one more, and its mean holds one. An output in lower precision is cast first.
        """
        values = outputs_of(joint) if joint.tangents else []
        if not values:
            return cls()
        previous = sum(_bytes(v) for v in _apart(values))
        # What the graph has made into a loss itself is in no other.
        inside = joint.made_into_loss if ends_in_loss else ()
        known = {key for i in inside for key in storages(joint.differentiable[i])}
        values = [v for v in _apart(values) if storage_key(v) not in known]
        if not values:
            return cls(targets_bytes=sum(beside), previous_bytes=previous)
        output, single = sum(_bytes(v) for v in values), sum(4 * _elements(v) for v in values)
        inputs = [_bytes(n.meta["val"]) for n in joint.primals if isinstance(n.meta.get("val"), Tensor)]
        # Whether some target is as large as the outputs: then the loss is of each element.
        dense = max((*beside, *inputs), default=0) >= max(_bytes(v) for v in values)
        wide = max(single, output)
        copies = (4 if dense else 3) + (wide > output)
        rows = 0 if dense else sum(_elements(v) // min((d for d in v.shape[1:] if d > 1), default=1) for v in values)
        return cls(copies * wide + 2 * 4 * rows, sum(beside), wide if dense else 0, previous)


def _apart(values: Iterable[Tensor]) -> list[Tensor]:
    """Return one of the tensors that share a storage, for each storage."""
    return list({storage_key(v): v for v in values}.values())


def outputs_of(joint: JointGraph) -> list[Tensor]:
    """Return the tensors that the graph returns and that a loss may differentiate."""
    nodes = {n for n in joint.forward_outputs if isinstance(n, fx.Node)} - set(joint.write_backs.values())
    values = (n.meta.get("val") for n in nodes)
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]


def _elements(value: Tensor) -> int:
    return _bytes(value) // value.element_size()


def _bytes(value: Tensor) -> int:
    return int(value.untyped_storage().nbytes())
