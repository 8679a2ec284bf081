"""Weak references to a session's parameters and optimizers."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from overspill.core import TensorKind
from overspill.runtime.optimizers import find_optimizers, optimizer_needs


class WeakReferences:
    """Parameters by weak references, and the optimizers that step on them.

    `optimizers` are those given by the user; None means all that step on the parameters.
    """

    def __init__(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] | None) -> None:
        self._refs: list[weakref.ref[Tensor]] = []
        self.optimizers = optimizers
        self.trained: set[int] = set()
        """Identities of the parameters that plans know to train, and so to have state, though some may be frozen
        later."""
        self.follow(parameters)

    def follow(self, parameters: Iterable[Tensor]) -> None:
        """Add new parameters; drop those that are gone."""
        here = [ref for ref in self._refs if ref() is not None]
        known = {id(ref()) for ref in here}
        self._refs = here + [weakref.ref(p) for p in parameters if id(p) not in known]

    def add(self, parameters: Iterable[Tensor], optimizers: Sequence[Optimizer] | None) -> None:
        """Add the parameters of another model.

        Without `optimizers`, those that step on its parameters are found.
        """
        alone = not self._refs
        self.follow(parameters)
        if optimizers is None or (self.optimizers is None and not alone):
            self.optimizers = None
        else:
            self.optimizers = [*(self.optimizers or ()), *optimizers]

    @property
    def parameters(self) -> list[Tensor]:
        """Parameters that are still alive."""
        return [p for ref in self._refs if (p := ref()) is not None]

    def kept_bytes(self) -> int:
        """Return the bytes of parameters, gradients and optimizer state between steps."""
        own = sum(p.nbytes * (2 if p.requires_grad else 1) for p in self.parameters)
        return own + (optimizer_needs(self.stepping(), self.trained).state_bytes if self.parameters else 0)

    def train(self) -> bool:
        """Note which parameters train; return whether some do that did not before."""
        before = len(self.trained)
        self.trained.update(id(p) for p in self.parameters if p.requires_grad)
        return len(self.trained) > before

    def gradients_are_kept(self) -> bool:
        """Return whether any parameter has a gradient now."""
        return any(p.grad is not None for p in self.parameters)

    def present(self) -> Iterator[tuple[TensorKind, list[Tensor]]]:
        """Yield the parameters, gradients and optimizer state that exist now, by kind."""
        yield TensorKind.PARAMETER, self.parameters
        yield TensorKind.GRADIENT, [p.grad for p in self.parameters if p.grad is not None]
        yield TensorKind.OPTIMIZER_STATE, [value for optimizer in self.stepping() for value in state_of(optimizer)]

    def updated_by(self, optimizer: Optimizer) -> bool:
        """Return whether `optimizer` updates any of the parameters."""
        own = {id(p) for p in self.parameters}
        return any(id(p) in own for group in optimizer.param_groups for p in group["params"])

    def stepping(self) -> Sequence[Optimizer]:
        """Return the optimizers that step on the parameters."""
        return self.optimizers if self.optimizers is not None else find_optimizers(self.parameters)


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the state tensors of an optimizer, those in lists included."""
    values = [value for of in optimizer.state.values() if isinstance(of, dict) for value in of.values()]
    listed = [value for many in values if isinstance(many, (list, tuple)) for value in many]
    return [value for value in (*values, *listed) if isinstance(value, Tensor)]
