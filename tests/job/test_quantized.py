"""Quantised layers as plans see them: which ops read the weights."""

from __future__ import annotations

import pytest

from overspill.core import Phase, TensorKind
from overspill.job import Job
from overspill.job.model import NamedModel
from overspill.runtime.capture_job import step_graph


@pytest.mark.short("4bit")
@pytest.mark.parametrize("quantize", ["4bit", "4bit-single", "8bit"])
def test_forward_and_backward_read_quantised_weights_so_that_plans_may_move_them(quantize: str) -> None:
    name = "decoder:width=64,depth=3,heads=2,vocabulary=96,seq_len=8"
    graph = step_graph(Job(NamedModel(name), 2, lora=4, quantize=quantize), whole_step=True)
    weights = [t for t in graph.tensors if t.kind is TensorKind.PARAMETER and t.dtype in {"uint8", "int8"}]
    phases = [{graph.ops[op].phase for op in graph.uses[weight.id]} for weight in weights]
    assert len(weights) >= 6
    assert all(weight.movable for weight in weights)
    assert all(Phase.FORWARD in found for found in phases)
    # Only what comes before the first adapter has no gradient to make.
    assert sum(Phase.BACKWARD in found for found in phases) >= 2 / 3 * len(weights)
    assert Phase.UPDATE not in set().union(*phases)
