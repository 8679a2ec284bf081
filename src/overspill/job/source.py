"""A job of another framework: its file or callable, and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from overspill.core.errors import RequestError

BATCH = "N"
"""The letter for the batch in a shape."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A model of another framework, with the shapes of its inputs."""

    framework: str
    target: str
    """Its file or callable."""
    inputs: tuple[str, ...] = ()
    """Shapes, as the user gave them."""

    fields: ClassVar[frozenset[str]] = frozenset({"batch", "optimizer"})
    """The fields of a job that it does not say by itself."""

    @property
    def name(self) -> str:
        """The model's file or callable."""
        return self.target

    @property
    def refusal(self) -> str:
        """Why the job's other fields do not apply, for an error."""
        return (
            f"for a model of PyTorch's, and --{self.framework} is trained as its framework does, in float32; leave "
            "that out"
        )

    @property
    def allocator(self) -> str:
        """The framework's own allocator; for ONNX it is MXNet's."""
        return "mxnet" if self.framework == "onnx" else self.framework

    @classmethod
    def of(cls, named: Mapping[str, object], inputs: Sequence[str]) -> Source | None:
        """Return the framework's job among command-line options, or None. Raises RequestError for two.

        It is the one of `named` that is not None.
        """
        given = [
            cls(framework, str(target), tuple(inputs)) for framework, target in named.items() if target is not None
        ]
        if len(given) > 1:
            raise RequestError(
                f"one job at a time, not --{given[0].framework} and --{given[1].framework}; leave one out"
            )
        if inputs and (not given or given[0].framework == "tensorflow"):
            raise RequestError(
                "--input is for --mxnet and --onnx; other models know the shapes of their inputs; leave it out"
            )
        return given[0] if given else None


def shapes_of(inputs: Sequence[str], batch: int) -> dict[str, Shape]:
    """Return names and shapes of inputs, parsed from `data=N,3,224,224`, where N is the batch.

    Raises RequestError for anything else.
    """
    found: dict[str, Shape] = {}
    for text in inputs:
        name, equals, sizes = text.partition("=")
        parts = [part.strip() for part in sizes.split(",")]
        if not name or not equals or not all(part == BATCH or (part.isascii() and part.isdecimal()) for part in parts):
            raise RequestError(f"--input {text} is not a shape; write for instance data={BATCH},3,224,224")
        found[name] = tuple(batch if part == BATCH else int(part) for part in parts)
        if 0 in found[name]:
            raise RequestError(f"--input {text} has no elements; give sizes of 1 or more")
    return found
