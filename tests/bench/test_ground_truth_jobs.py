"""The measured jobs: data as published, models of the published sizes, loops that run for real and with fake tensors."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from ground_truth import dnnmem, jobs, torchvision_models, transformer_models

# Published counts: torchvision's documentation (less 990 classes where a network has 10), the hub's model cards.
PARAMETERS = {
    "ConvNeXtBase": 88_591_464,
    "ConvNeXtTiny": 28_589_128,
    "MnasNet": 4_383_312 - 990 * 1281,
    "MobeNetV3Large": 5_483_032 - 990 * 1281,
    "MobeNetV3Small": 2_542_856 - 990 * 1025,
    "MobileNetV2": 3_504_872,
    "RegNetX400MF": 5_495_976,
    "RegNetY400MF": 4_344_144,
    "ResNet101": 44_549_160,
    "ResNet152": 60_192_808,
    "VGG16": 138_357_544,
    "VGG19": 143_667_240,
    "EleutherAI/gpt-neo-125M": 125_198_592,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "T5-small": 60_506_624,
    "distilbert/distilgpt2": 81_912_576,
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "openai-community/gpt2": 124_439_808,
    "t5-base": 222_903_552,
}


ALONE = "OVERSPILL_GROUND_TRUTH_ALONE"  # set by test_accuracy.py, which runs this file in a process of its own


def need(model: str) -> None:
    if model in torchvision_models.NETWORKS:
        try:
            torchvision_models.torchvision()
        except SystemExit:
            pytest.skip("needs torchvision: make definitions")
    if model in (*transformer_models.NETWORKS, "BERT"):
        if not os.environ.get(ALONE):
            pytest.skip("puts an old transformers before the installed one: runs in a process of its own")
        try:
            transformer_models.transformers()
        except SystemExit:
            pytest.skip("needs transformers 4.51.3; see bench/ground_truth/transformer_models.py")


def row_of(model: str, **changes: object) -> jobs.Row:
    text = next(row for row in jobs.load() if row.family == "Transformer")
    image = next(row for row in jobs.load() if row.family == "CNN")
    return replace(text if model in transformer_models.NETWORKS else image, model=model, **changes)


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


class TestData:
    def test_every_row_is_read_with_its_types(self) -> None:
        rows = jobs.load()
        assert len(rows) == 58
        assert sum(row.real_oom for row in rows) == 7
        assert {row.zero_grad_mode for row in rows} == {0, 1, 2}
        assert all(row.ground_bytes % 2**21 == 0 and row.ground_bytes < row.total_gpu_memory_bytes for row in rows)

    def test_a_mode_that_was_not_recorded_is_read_as_0(self) -> None:
        assert all(row.zero_grad_mode == 0 for row in jobs.load() if not row.zero_grad_recorded)

    def test_every_model_of_the_data_can_be_built(self) -> None:
        known = {"CNN": torchvision_models.NETWORKS, "Transformer": transformer_models.NETWORKS}
        assert all(row.model in known[row.family] for row in jobs.load())

    def test_the_paper_has_as_many_experiments_for_each_framework(self) -> None:
        counts = [len(dnnmem.load(framework)) for framework in dnnmem.FRAMEWORKS]
        assert counts == [12, 13, 12]

    def test_the_papers_percentages_follow_from_its_figures(self) -> None:
        """Table 6 and 7 print |estimated - real| / real beside the figures; these are the means in the text."""
        for table, means in (("Table 6", (5.9, 14.4, 3.9)), ("Table 7", (13.9, 11.3, 9.6))):
            for framework, mean in zip(dnnmem.FRAMEWORKS, means, strict=True):
                rows = [row for row in dnnmem.load(framework) if row.source == table]
                errors = [abs(row.estimated_gb - row.real_gb) / row.real_gb for row in rows]
                assert 100 * sum(errors) / len(errors) == pytest.approx(mean, abs=0.15)


@pytest.mark.short("VGG16", "ResNet152", "MnasNet", "RegNetX400MF", "ConvNeXtTiny")
@pytest.mark.parametrize("model", PARAMETERS)
def test_a_model_has_the_published_number_of_parameters(model: str, fake: None) -> None:
    need(model)
    assert sum(parameter.numel() for parameter in jobs.build(row_of(model)).parameters()) == PARAMETERS[model]


@pytest.mark.short("0-MnasNet", "0-MobeNetV3Small")
@pytest.mark.parametrize("model", ["MnasNet", "MobeNetV3Small"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_an_image_job_runs_for_real_on_a_tiny_batch(model: str, mode: int) -> None:
    need(model)
    jobs.run(row_of(model, batch_size=2, zero_grad_mode=mode), "cpu", iterations=2)


@pytest.mark.parametrize("model", ["T5-small", "distilbert/distilgpt2"])
def test_a_text_job_runs_for_real_on_a_tiny_batch(model: str) -> None:
    need(model)
    jobs.run(row_of(model, batch_size=1, optimizer="SGD"), "cpu", iterations=1)


@pytest.mark.long
@pytest.mark.parametrize("model", sorted({row.model for row in jobs.load()}))
def test_the_largest_batch_of_a_model_runs_with_fake_tensors(model: str, fake: None) -> None:
    need(model)
    largest = max((row for row in jobs.load() if row.model == model), key=lambda row: row.batch_size)
    jobs.run(largest, "cpu", iterations=2)


@pytest.mark.parametrize("mode", [0, 1, 2])
def test_training_changes_the_weights_in_every_mode(mode: int) -> None:
    need("MobeNetV3Small")
    torch.manual_seed(0)
    row = row_of("MobeNetV3Small", batch_size=2, zero_grad_mode=mode, optimizer="SGD")
    model = jobs.build(row)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    jobs.train(row, model, "cpu", iterations=1)
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


@pytest.mark.long
def test_whoever_asks_is_told_of_every_iteration(fake: None) -> None:
    need("MobeNetV3Small")
    starts: list[int] = []
    jobs.run(row_of("MobeNetV3Small"), "cpu", iterations=3, started=lambda: starts.append(1))
    assert len(starts) == 3


@pytest.mark.short("VGG16", "LSTM")
@pytest.mark.parametrize("row", [row for row in dnnmem.load() if row.source == "Table 6"], ids=lambda row: row.model)
def test_a_job_of_the_papers_table_runs_with_fake_tensors(row: dnnmem.Row, fake: None) -> None:
    need(row.model)
    dnnmem.run(row, "cpu", iterations=2)


def test_bert_of_the_paper_runs_with_fake_tensors(fake: None) -> None:
    need("BERT")
    dnnmem.run(next(row for row in dnnmem.load() if row.model == "BERT"), "cpu", iterations=2)


def test_an_unknown_model_is_refused_with_the_names_that_exist() -> None:
    with pytest.raises(SystemExit, match=r"AlexNet.*ResNet101"):
        torchvision_models.build("AlexNet")
    with pytest.raises(SystemExit, match=r"gpt-5.*T5-small"):
        transformer_models.build("gpt-5")


def test_a_directory_that_does_not_exist_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVERSPILL_TORCHVISION", "/nowhere")
    torchvision_models.torchvision.cache_clear()
    with pytest.raises(SystemExit, match="no directory"):
        torchvision_models.torchvision()
