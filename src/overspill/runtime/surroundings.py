"""Fixed device bytes of a training step outside one captured graph.

Of the optimizer, other parameters, and a loss outside the model.
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

from .optimizers import find_optimizers, optimizer_needs
from .parallel import bucket_bytes


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
) -> Surroundings:
    """Device bytes outside the graph `joint` during a training step.

    The graph reads the parameters `here` of all the model's `parameters`. `optimizers`: those that step on them; None:
    found among those that exist. `reserve`: bytes for a loss outside the model; None: those of `LossOutside`.
    `retained_bytes`: what other graphs of the model leave there. `clips`: gradients are clipped by their norm before
    the update. `beside`: bytes of each batch on the device besides the model's inputs. `ends_in_loss`: no loss outside is
    made from outputs that the graph makes into a loss itself. `trained`: as of `optimizer_needs`.
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
        reserved_bytes=loss.workspace_bytes,
        previous_bytes=loss.previous_bytes,
        accumulates=accumulates,
        clip_bytes=_norm_bytes(p for o in stepping for group in o.param_groups for p in group["params"])
        if clips
        else 0,
        outside_graph=(
            (TensorKind.PARAMETER, sum(p.nbytes for p in outside)),
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
    """Fixed device bytes outside the graph of a job's model and loss."""
    return surroundings_of(
        joint, here, parameters, [optimizer], reserve, accumulates=job.keeps_gradients, clips=job.clips
    )


def _norm_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes that clip_grad_norm_ has at once.

    The norm of each gradient, all of them together, and what follows from these.
    """
    return 2 * 4 * sum(p.requires_grad for p in parameters) + 64


@dataclass(frozen=True)
class LossOutside:
    """Bytes for a loss computed outside the graph.

    None where the graph returns its own. `workspace_bytes`: between forward and backward. `targets_bytes`: batches
    besides the model's inputs, all the while. `held_bytes`: what a loss keeps, all the while, of the elements that it
    was made from (a mean that PyTorch computes in place keeps them). `previous_bytes`: outputs of the step before,
    which a training loop holds until the model returns.
    """

    workspace_bytes: int = 0
    targets_bytes: int = 0
    held_bytes: int = 0
    previous_bytes: int = 0

    @classmethod
    def of(cls, joint: JointGraph, beside: Sequence[int], *, ends_in_loss: bool = False) -> LossOutside:
        """Bytes for a loss of the graph's differentiable outputs; with `ends_in_loss`, of those made into none inside.

        Batches of `beside` bytes are on the device. In units of an output in float32: a cross-entropy saves one, its
        gradient goes through another, and becomes a third, with a number or two per row; a loss of each element (where
        there is a target as large) has one more, and its mean holds one. An output in lower precision is cast first.
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
    """One of those that share a storage."""
    return list({storage_key(v): v for v in values}.values())


def outputs_of(joint: JointGraph) -> list[Tensor]:
    """Tensors that the graph returns and a loss may differentiate."""
    nodes = {n for n in joint.forward_outputs if isinstance(n, fx.Node)} - set(joint.write_backs.values())
    values = (n.meta.get("val") for n in nodes)
    return [v for v in values if isinstance(v, Tensor) and v.is_floating_point() and v.dim()]


def _elements(value: Tensor) -> int:
    return _bytes(value) // value.element_size()


def _bytes(value: Tensor) -> int:
    return int(value.untyped_storage().nbytes())
