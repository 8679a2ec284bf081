"""What a training step has on the device besides one captured graph: optimizer, other parameters, a loss outside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, fx, nn
from torch.optim import Optimizer

from overspill.capture.compiled.graph import Surroundings
from overspill.capture.compiled.joint import JointGraph, storage_bytes
from overspill.core import TensorKind
from overspill.core.units import parse_bytes

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
) -> Surroundings:
    """What is on the device besides the graph `joint`, which reads the parameters `here` of all the model's `parameters`.

    `optimizers`: those that step on them; None: found among those that exist. `reserve`: bytes for a loss outside the
    model; None: twice what the caller differentiates. `retained_bytes`: what other graphs of the model leave there.
    """
    known = {id(p): p for p in (*parameters, *here)}
    stepping = optimizers if optimizers is not None else find_optimizers(list(known.values()))
    known |= {id(p): p for o in stepping for group in o.param_groups for p in group["params"]}
    needs = optimizer_needs(stepping)
    inside = {id(p) for p in here}
    outside = [p for key, p in known.items() if key not in inside]
    return Surroundings(
        optimizer_state_bytes=needs.state_bytes,
        update_bytes=needs.update_bytes,
        reserved_bytes=outside_loss_bytes(joint) if reserve is None else parse_bytes(reserve),
        accumulates=accumulates,
        elsewhere=(
            (TensorKind.PARAMETER, sum(p.nbytes for p in outside)),
            (TensorKind.GRADIENT, sum(p.nbytes for p in outside if p.requires_grad)),
            (TensorKind.ACTIVATION, retained_bytes),
            (TensorKind.COMMUNICATION, bucket_bytes()),
        ),
    )


def outside_loss_bytes(joint: JointGraph) -> int:
    """Twice the size of what the caller differentiates outside the graph: a loss saves its input's size and makes it again."""
    outputs = {n for n in joint.forward_outputs if isinstance(n, fx.Node)} - set(joint.write_backs.values())
    sizes: dict[int, int] = {}
    for node in outputs:
        if isinstance(node.meta.get("val"), Tensor) and node.meta["val"].is_floating_point() and node.meta["val"].dim():
            sizes.update(storage_bytes(node))
    return 2 * sum(sizes.values()) if joint.tangents else 0
