"""Tensors that a loss function returns in addition to its loss.

The step returns them in their places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from torch import Tensor

from overspill.core.errors import RequestError, UnsupportedError
from overspill.pytorch.trees import TreeSpec, tree_flatten, tree_flatten_with_path, tree_unflatten


@dataclass(frozen=True)
class Results:
    """The places of the loss and other tensors in the return value of a loss function."""

    rebuild: Callable[[Any, list[Any]], Any] | None = None
    """Makes the return value from a loss and the rest; None if the loss is all."""
    spec: TreeSpec | None = None
    """The tree of the rest."""
    places: tuple[int, ...] = ()
    """Positions of tensors among the leaves of the rest."""

    def filled(self, loss: Tensor, others: list[Tensor]) -> Any:
        """Return the same structure with these tensors in it, or the loss alone if that was all."""
        if self.rebuild is None or self.spec is None:
            return loss
        leaves: list[Any] = [None] * self.spec.num_leaves
        for place, tensor in zip(self.places, others, strict=True):
            leaves[place] = tensor
        return self.rebuild(loss, tree_unflatten(leaves, self.spec))


def split_results(returned: Any) -> tuple[Any, list[Tensor], Results]:
    """Return the loss, the other tensors detached, and their places in `returned`.

    `returned` is a loss, a tuple or list that begins with one, or a mapping or dataclass with a `loss`. Raises
    RequestError and UnsupportedError.
    """
    parts = _parts(returned)
    if parts is None:
        return returned, [], Results()
    loss, rest, rebuild = parts
    # Only tensors can be results of a planned step.
    leaves, spec = tree_flatten(rest)
    for path, leaf in tree_flatten_with_path(rest)[0]:
        if leaf is not None and not isinstance(leaf, Tensor):
            where = "".join(map(str, path))
            raise UnsupportedError(
                f"the loss function returns {where}, a {type(leaf).__name__}, besides its loss; a planned step gives "
                "back tensors, and would make anything else once, when it is planned: make it a tensor, or leave it out"
            )
    places = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)
    # Clones, for what is returned may be a view of what a later op changes: a weight, say.
    return loss, [leaves[i].detach().clone() for i in places], Results(rebuild, spec, places)


def _parts(returned: Any) -> tuple[Any, Any, Callable[[Any, Any], Any]] | None:
    """Return the loss in `returned`, the rest, and a function that rebuilds it; None for a loss alone."""
    kind = type(returned)
    # The loss comes first in a sequence, and as `loss` in a mapping or dataclass.
    if isinstance(returned, (tuple, list)) and returned:
        if hasattr(kind, "_fields"):
            return returned[0], list(returned[1:]), lambda loss, rest: kind(loss, *rest)
        return returned[0], list(returned[1:]), lambda loss, rest: kind((loss, *rest))
    if isinstance(returned, Mapping):
        whole = dict(returned)
    elif is_dataclass(returned):
        whole = {field.name: getattr(returned, field.name) for field in fields(returned)}
    else:
        return None
    if "loss" not in whole:
        raise RequestError(f"the loss function returns a {kind.__name__} without 'loss'; call its loss that")
    # Take the loss out; `rebuild` puts it back in its place.
    order = list(whole)
    loss = whole.pop("loss")

    def rebuild(loss: Any, rest: dict[str, Any]) -> Any:
        again = {name: loss if name == "loss" else rest[name] for name in order}
        return kind(**again) if is_dataclass(kind) else dict(again)

    return loss, whole, rebuild
