"""Record the step that `torch.compile` makes, in place of the eager one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from overspill.capture.recording.recorder import Recorder
from overspill.core import TensorKind
from overspill.models.step import cast, convert
from overspill.pytorch.fake_tensors import FakeTensorMode
from overspill.pytorch.trees import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

Call = Callable[[nn.Module, Any], Any]


def compiled_step(
    build: Callable[[], nn.Module],
    make_inputs: Callable[[], Any],
    call: Call,
    dtype: torch.dtype | None,
    *,
    trains: bool = True,
    arguments: Call = lambda _, inputs: inputs,
) -> Callable[[Recorder], Call]:
    """Return `call(module, inputs)` as stock `torch.compile` runs it, for any recorder's GPU.

    `arguments` converts a batch to the input of `call`. Raises the errors of `write`.
    """
    # Inductor takes seconds to import.
    from overspill.capture.programs.written_programs import WrittenStep  # noqa: PLC0415

    with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(trains):
        module = build().train(trains)
        inputs = make_inputs()
        if dtype is not None:
            convert(module, dtype)
            inputs = tree_map_only(Tensor, partial(cast, dtype=dtype), inputs)
        # Inductor writes the programs; nothing is run.
        batch, spec = tree_flatten(arguments(module, inputs))
        written = WrittenStep(lambda *leaves: call(module, tree_unflatten(leaves, spec)), module, batch)

    def on(recorder: Recorder) -> Call:
        def run(module: nn.Module, inputs: Any) -> Any:
            batch = tree_leaves(arguments(module, inputs))
            recorder.enter(module)
            try:
                return written(
                    module, batch, partial(recorder.placing, on_device=True),
                    lambda saved: recorder.mark(saved, TensorKind.ACTIVATION),
                )  # fmt: skip
            finally:
                recorder.leave()

        return run

    return on
