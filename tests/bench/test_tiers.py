"""The rules of other systems in the simulator: valid schedules that do what the systems do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from overspill.core import Device, Graph, TensorKind, Verb
from overspill.costs import op_seconds
from overspill.devices import load_device
from overspill.job import Job, NamedModel
from overspill.runtime.options import Options
from overspill.runtime.preview import step_of
from overspill.simulate import check

BENCH = Path(__file__).parents[2] / "bench"
TINY = (
    "hf:llama,vocab_size=512,num_hidden_layers=6,hidden_size=64,intermediate_size=128,num_attention_heads=4,"
    "num_key_value_heads=4,tie_word_embeddings=False"
)


@pytest.fixture
def tiers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import tiers

    return tiers


@pytest.fixture
def device() -> Device:
    return load_device("rtx4090")


@pytest.fixture
def graph(device: Device) -> Graph:
    job = Job(NamedModel(TINY, seq_len=64), 1, "adamw", checkpointing=True)
    return step_of(job, Options(device=device, whole_step=True), moves=True).graph


@pytest.mark.long  # 5 s: it captures a model of transformers
def test_rules_are_valid_keep_and_fetch_what_their_systems_do(tiers: ModuleType, graph: Graph, device: Device) -> None:
    seconds = op_seconds(graph, device)
    parameters = {t.id for t in graph.tensors if t.kind is TensorKind.PARAMETER and t.nbytes >= 1024}
    peaks: dict[str, int] = {}
    for rule in tiers.RULES:
        made = tiers.schedule_of(rule, graph, device, seconds)
        peaks[rule.name] = check(graph, made).peak_bytes
        # All updates run on the host, behind all ops.
        assert len(made.targets(Verb.RUN_ON_HOST)) == sum(t.kind is TensorKind.PARAMETER for t in graph.tensors)
        verbs = [instruction.verb for instruction in made.instructions]
        assert Verb.RUN not in verbs[verbs.index(Verb.RUN_ON_HOST) :]
        # Each weight comes once; those of blocks that are streamed twice, for forward and for backward.
        fetched = [made.targets(Verb.PREFETCH).count(t) for t in parameters]
        assert set(fetched) == ({1} if rule.name == "ZeRO-Offload" else {1, 2})
    streamed = max(peak for name, peak in peaks.items() if name != "ZeRO-Offload")
    assert peaks["ZeRO-Offload"] > streamed
