"""The model of a job: a name, a module, or a script."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from overspill import models
from overspill.core.errors import RequestError
from overspill.models import BuiltModel

if TYPE_CHECKING:  # the command line names a model before it pays for torch
    from torch import Tensor, nn


def _nobody(_: str) -> None:
    """Ignore the message."""


@dataclass(frozen=True)
class NamedModel:
    """A model by name; calling it builds the model again.

    The name is that of a built-in model, of a configuration, or of a user's callable.
    """

    name: str
    small: bool = False
    image_size: int | None = None
    seq_len: int | None = None
    tell: Callable[[str], None] = _nobody
    """Called with each value that the user did not give and that was assumed."""
    typed: str = field(default="", compare=False)
    """The name as the user wrote it, if that is shorter."""

    @property
    def sizes(self) -> list[str]:
        """The sizes that the user chose, in words."""
        images = None if self.image_size is None else f"images of {self.image_size}"
        tokens = None if self.seq_len is None else f"{self.seq_len} tokens"
        return [said for said in (self.small and "small", images, tokens) if said]

    def __call__(self) -> BuiltModel:
        """Return a new model. Raises RequestError."""
        built = models.load(self.name, small=self.small, image_size=self.image_size, seq_len=self.seq_len)
        if built.assumed:
            self.tell(built.assumed)
        return built


class GivenModel:
    """A user's module or model function, with inputs and a loss.

    `loss` is the function that training minimises. `batch` is the first dimension of the inputs, if they have one. A
    function without `inputs` returns what the callable of `package.module:callable` does.
    """

    def __init__(
        self, build: nn.Module | Callable[[], nn.Module], inputs: Any, loss: Callable[..., Tensor] | None = None
    ) -> None:
        """Raise RequestError if these cannot be a model and its inputs."""
        from torch import nn  # noqa: PLC0415

        from overspill.models.inputs import Inputs  # noqa: PLC0415

        if not callable(build):
            raise RequestError(f"build is a {type(build).__name__}; pass a module or a function that returns one")
        if inputs is None and (isinstance(build, nn.Module) or loss is not None):
            raise RequestError("pass inputs: the tensors that the model reads, or a function that makes them")
        self._build, self._inputs, self.loss = build, None if inputs is None else Inputs(inputs), loss
        self.batch = None if self._inputs is None else self._inputs.batch
        self.name = type(build).__name__ if isinstance(build, nn.Module) else getattr(build, "__name__", "model")

    def __call__(self) -> BuiltModel:
        """Return the model, ready for fake tensors. Raises RequestError.

        A module that was passed is copied without memory for its weights.
        """
        from torch import nn  # noqa: PLC0415

        from overspill.models.step import without_memory  # noqa: PLC0415
        from overspill.models.user import model_of  # noqa: PLC0415

        module = without_memory(self._build) if isinstance(self._build, nn.Module) else self._build()
        if self._inputs is None:  # what it returns says what it reads, as the command line's models do
            return model_of(self.name, module)
        if not isinstance(module, nn.Module):
            raise RequestError(f"build returned {type(module).__name__}, not a module; let it return a torch.nn.Module")
        return BuiltModel(type(module).__name__, module, self._batch, self._loss_on)

    def _batch(self, size: int | None) -> tuple[Any, ...]:
        assert self._inputs is not None
        made = self._inputs.at(size)
        return tuple(made) if isinstance(made, (list, tuple)) else (made,)

    def _loss_on(self, model: nn.Module, *batch: Any) -> Tensor:
        from overspill.models.step import scalar_loss  # noqa: PLC0415

        return scalar_loss(model, self.loss, batch)


@dataclass(frozen=True)
class Script:
    """A user's training script, run on a simulated GPU."""

    path: str
    arguments: tuple[str, ...] = ()
    iterations: int = 3
    """It runs for the first so many."""
    time_limit: float = 600.0
    """Seconds after which it is ended."""
    allow_writes: bool = False
    """Whether it may change real files."""
    tell: Callable[[str], None] = _nobody
    """Called with what its recording lacks."""

    fields: ClassVar[frozenset[str]] = frozenset()
    """The fields of a job that it does not say by itself."""
    refusal: ClassVar[str] = "for a model, and a script has its own way to train; leave that out"

    @property
    def name(self) -> str:
        """The script's file."""
        return self.path
