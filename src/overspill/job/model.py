"""What a job runs: a model by its name, or a module of the user's with its inputs and its loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from overspill import models
from overspill.core.errors import RequestError
from overspill.models import BuiltModel

if TYPE_CHECKING:  # the command line names a model before it pays for torch
    from torch import Tensor, nn


def _nobody(_: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class NamedModel:
    """A built-in model, one by its configuration, or a callable of the user's; called, it builds it anew.

    `tell` is called with what nobody gave and was assumed.
    """

    name: str
    small: bool = False
    image_size: int | None = None
    seq_len: int | None = None
    tell: Callable[[str], None] = _nobody

    def __call__(self) -> BuiltModel:
        """The model, made anew. Raises RequestError."""
        built = models.load(self.name, small=self.small, image_size=self.image_size, seq_len=self.seq_len)
        if built.assumed:
            self.tell(built.assumed)
        return built


class GivenModel:
    """A module, or a function that makes one, with what it reads and the `loss` that it is trained on.

    `batch` is the first dimension of the inputs, if they have one.
    """

    def __init__(
        self, build: nn.Module | Callable[[], nn.Module], inputs: Any, loss: Callable[..., Tensor] | None = None
    ) -> None:
        """Raises RequestError for what cannot be a model or its inputs."""
        from torch import nn  # noqa: PLC0415

        from overspill.models.inputs import Inputs  # noqa: PLC0415

        if not callable(build):
            raise RequestError(f"build is a {type(build).__name__}; pass a module or a function that returns one")
        if inputs is None:
            raise RequestError("pass inputs: the tensors that the model reads, or a function that makes them")
        self._build, self._inputs, self.loss = build, Inputs(inputs), loss
        self.batch = self._inputs.batch
        self.name = type(build).__name__ if isinstance(build, nn.Module) else getattr(build, "__name__", "model")

    def __call__(self) -> BuiltModel:
        """The model, made where fake tensors are: a module's copy has no memory. Raises RequestError."""
        from torch import nn  # noqa: PLC0415

        from overspill.models.step import without_memory  # noqa: PLC0415

        module = without_memory(self._build) if isinstance(self._build, nn.Module) else self._build()
        if not isinstance(module, nn.Module):
            raise RequestError(f"build returned {type(module).__name__}, not a module; let it return a torch.nn.Module")
        return BuiltModel(type(module).__name__, module, self._batch, self._loss_on)

    def _batch(self, size: int | None) -> tuple[Any, ...]:
        made = self._inputs.at(size)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    def _loss_on(self, model: nn.Module, *batch: Any) -> Tensor:
        from overspill.models.step import scalar_loss  # noqa: PLC0415

        return scalar_loss(model, self.loss, batch)


@dataclass(frozen=True)
class Script:
    """A training script as its user has it, and its `arguments`, run for its first `iterations` on a GPU that is not there.

    It is ended after `time_limit` seconds, and changes real files only with `allow_writes`.
    """

    path: str
    arguments: tuple[str, ...] = ()
    iterations: int = 3
    time_limit: float = 600.0
    allow_writes: bool = False

    fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of a job that it does not say by itself."""
    refusal: ClassVar[str] = "for a model, and a script has its own way to train; leave that out"

    @property
    def name(self) -> str:
        """The file."""
        return self.path
