"""The Graph of one rank: parts by rows, whole parameters between gather and last reader, sums as parts."""

from __future__ import annotations

from functools import cache

import pytest

from overspill.capture.sharding import GATHER, SCATTER
from overspill.core import Graph, Phase, TensorKind, Verb
from overspill.devices import load_device
from overspill.estimation.api import Setting
from overspill.estimation.api import of_job as estimate
from overspill.job import Job, NamedModel, Parallel
from overspill.plans.plan import unmanaged_peak
from overspill.policies.in_core import Liveness
from overspill.runtime.options import Options
from overspill.runtime.preview import compare_job, step_of
from overspill.simulate import check

RANKS = 4
MODEL = NamedModel("decoder:width=32,depth=2,heads=2,vocabulary=64,seq_len=8")
H100 = load_device("h100")


@cache
def rank(**options: object) -> Graph:
    job = Job(MODEL, 2, "adamw", parallel=Parallel("fsdp", RANKS, **options))  # type: ignore[arg-type]
    return step_of(job, Options(device=H100)).graph


def test_a_rank_has_a_part_of_parameters_and_their_state_and_gathers_each_group_once() -> None:
    alone = step_of(Job(MODEL, 2, "adamw"), Options(device=H100, whole_step=True)).graph
    ours = rank()
    for kind in (TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE):
        whole, part = (sum(t.nbytes for t in g.tensors if t.kind is kind and t.persistent) for g in (alone, ours))
        assert whole / RANKS <= part < 1.1 * whole / RANKS
    gathers, scatters = ([op for op in ours.ops if op.name == name] for name in (GATHER, SCATTER))
    assert gathers[0].layer == scatters[-1].layer == "root"
    assert len({op.layer for op in gathers}) == len(gathers) == len(scatters) > 2
    sent = sum(op.collective.nbytes for op in gathers if op.collective is not None)
    assert sent == sum(t.nbytes for t in alone.tensors if t.kind is TensorKind.PARAMETER)
    assert all(op.recomputable for op in gathers)


def test_updates_read_parts_and_all_else_reads_wholes() -> None:
    ours = rank()
    shards = {t.id for t in ours.tensors if t.kind is TensorKind.PARAMETER and t.persistent}
    for op in ours.ops:
        reads = shards.intersection(op.reads)
        assert not reads or op.name == GATHER or op.phase is Phase.UPDATE
        if op.phase is Phase.UPDATE and reads:
            assert {ours.tensors[t].nbytes for t in op.reads if len(ours.tensors[t].shape) > 1} == {
                ours.tensors[t].nbytes for t in reads if len(ours.tensors[t].shape) > 1
            }


@pytest.mark.long
def test_comparisons_are_of_the_same_step() -> None:
    job = Job(MODEL, 2, "adamw", parallel=Parallel("fsdp", RANKS))
    (row,) = compare_job(job, Options(device=H100), ["liveness"])
    assert row.plan is not None
    assert row.plan.peak_bytes == unmanaged_peak(rank(), H100)


@pytest.mark.long
def test_the_dtype_of_what_is_gathered_may_be_another() -> None:
    mixed, plain = rank(param_dtype="bfloat16"), rank()
    sent = [[op.collective.nbytes for op in g.ops if op.collective is not None] for g in (mixed, plain)]
    assert [2 * nbytes for nbytes in sent[0]] == sent[1]
    kept = [sum(t.nbytes for t in g.tensors if t.persistent and t.kind is TensorKind.PARAMETER) for g in (mixed, plain)]
    assert kept[0] == kept[1]


@pytest.mark.long
def test_the_unmanaged_step_gathers_again_what_the_program_does() -> None:
    for again, graph in ((True, rank()), (False, rank(reshard_after_forward=False))):
        made = Liveness().plan(graph, H100)
        gathered = [op for op in made.targets(Verb.RECOMPUTE) if graph.ops[op].name == GATHER]
        assert bool(gathered) is again
        check(graph, made)


@pytest.mark.long
@pytest.mark.parametrize("again", [True, False])
def test_the_unmanaged_step_takes_what_the_estimate_says(again: bool) -> None:
    model = "hf:llama,vocab_size=32000,num_hidden_layers=4,hidden_size=512,intermediate_size=2048,num_attention_heads=8"
    parallel = Parallel("fsdp", 8, reshard_after_forward=again)
    job = Job(NamedModel(model, seq_len=1024), 2, "adamw", "bfloat16", parallel=parallel)
    said = estimate(job, Setting.of("h100")).peak
    ours = unmanaged_peak(step_of(job, Options(device=H100)).graph, H100)
    assert ours == pytest.approx(said.requested_bytes - said.by_category["workspaces"], rel=0.03)
