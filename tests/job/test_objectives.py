"""Training by preferences: what a frozen reference takes, and whose numbers a step has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from overspill.core import TensorKind
from overspill.core.errors import RequestError
from overspill.estimation.api import Setting, of_job
from overspill.job import Job, NamedModel, Parallel
from overspill.job.prepare import prepare
from overspill.job.prepare.objectives import BETA
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.runtime.training import train, train_plain

LLAMA = NamedModel(
    "hf:llama,hidden_size=64,num_hidden_layers=2,num_attention_heads=2,intermediate_size=64,vocab_size=128", seq_len=16
)
DPO = Job(LLAMA, 2, "adamw", objective="dpo")


def weight_bytes(job: Job) -> int:
    return of_job(job, Setting.of("t4")).breakdown["weights"]


def test_a_reference_is_a_copy_of_the_weights_and_with_adapters_none() -> None:
    usual = replace(DPO, objective=None, batch=4)
    assert weight_bytes(DPO) == pytest.approx(2 * weight_bytes(usual), rel=0.02)
    assert weight_bytes(replace(DPO, lora=4)) == weight_bytes(replace(usual, lora=4))


def test_the_first_loss_of_dpo_is_that_of_two_equal_models() -> None:
    built = DPO.build()
    prepare(built.module, DPO)
    texts = built.make_batch(2)
    assert len(texts[0]) == 4  # two pairs
    loss = built.loss(built.module, *texts)
    torch.testing.assert_close(loss, torch.tensor(0.5).log().neg())
    loss.backward()
    assert all(p.grad is None for p in built.module.reference.parameters())
    assert any(p.grad is not None and p.grad.any() for p in built.module.parameters())


def test_grpo_at_first_is_minus_the_advantage() -> None:
    job = replace(DPO, objective="grpo", lora=4)
    built = job.build()
    prepare(built.module, job)
    loss = built.loss(built.module, *built.make_batch(2))
    torch.testing.assert_close(loss, torch.tensor(-1.0))
    assert BETA
    assert "inference engine" in built.assumed


@pytest.mark.long
@pytest.mark.parametrize("job", [DPO, replace(DPO, objective="grpo", lora=4)], ids=["dpo", "grpo-lora"])
def test_a_plan_has_the_reference_and_trains_with_plain_bits(job: Job) -> None:
    graph = step_of(job, Options(device="t4")).graph
    weights = sum(t.nbytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)
    assert weights == pytest.approx(weight_bytes(job), rel=0.02)
    options = Options(budget=0.9, store="host")
    assert train(job, options, steps=2).losses == train_plain(job, options, steps=2).losses


def test_what_an_objective_does_not_go_with_is_refused_by_name() -> None:
    with pytest.raises(RequestError, match="one GPU"):
        replace(DPO, parallel=Parallel("ddp", 2))
    other = Job(NamedModel("gpt2", small=True), 2, "adamw", objective="dpo")
    with pytest.raises(RequestError, match="causal language model"):
        of_job(other, Setting.of("t4"))
