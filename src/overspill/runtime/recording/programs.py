"""Lowered programs of Inductor's that tell a recorder what they do: the same text, with the lines that tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from overspill.core import Graph

from .record import Label
from .recorder import Recorder

Lowered = Callable[[list[Any]], list[Any]]
TELLS = "overspill_told."
"""What the lines begin with that tell."""


class LoweredPrograms:
    """Forward and backward as text that carries a plan out, and `told` as one that tells a recorder what it does as well.

    The text has lines for that, which are left out of what runs otherwise. `labels` are what they are of, and `given` has for
    both functions which tensor each argument is.
    """

    def __init__(
        self,
        graph: Graph,
        source: str,
        namespace: dict[str, Any],
        labels: Sequence[Label],
        given: Sequence[Sequence[int | None]],
    ) -> None:
        self._graph = graph
        self._source = source
        self._namespace = namespace
        self._labels = labels
        self._given = given
        lines = source.splitlines(keepends=True)
        self.plain = self._made("".join(line for line in lines if not line.lstrip().startswith(TELLS)), namespace)

    def told(self, recorder: Recorder) -> tuple[Lowered, ...]:
        """The functions that tell `recorder` what they do."""

        def made() -> tuple[Lowered, ...]:
            told = _Told(recorder, self._labels)
            functions = self._made(self._source, self._namespace | {TELLS.strip("."): told})
            return tuple(map(given_first, functions, self._given))

        def given_first(function: Lowered, tensors: Sequence[int | None]) -> Lowered:
            def run(args: list[Any]) -> list[Any]:
                recorder.given(self._graph, tensors, args)
                return function(args)

            return run

        return recorder.form_of(self, made)

    @staticmethod
    def _made(source: str, namespace: dict[str, Any]) -> tuple[Lowered, ...]:
        namespace = dict(namespace)
        exec(compile(source, "<Overspill's plan of Inductor's program>", "exec"), namespace)  # noqa: S102
        return tuple(namespace[name] for name in ("forward", "backward") if name in namespace)


class _Told(NamedTuple):
    """What the lines of a program that tell are calls of."""

    recorder: Recorder
    labels: Sequence[Label]

    def begin(self, label: int) -> None:
        self.recorder.begin(self.labels[label])

    def end(self, *made: torch.Tensor) -> None:
        self.recorder.end(made)
