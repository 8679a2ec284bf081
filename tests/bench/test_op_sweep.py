"""The sweep over PyTorch's ops tells what is identical from what is not, and those that were put right stay so."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCH = Path(__file__).parents[2] / "bench"
MENDED = (
    "nn.functional.interpolate.bilinear", "nn.functional.interpolate.bicubic", "nn.functional.interpolate.trilinear",
    "nn.functional.interpolate.linear", "nn.functional.interpolate.nearest", "nn.functional.interpolate.nearest-exact",
    "nn.functional.upsample_bilinear", "nn.functional.upsample_nearest", "nn.functional.hardshrink",
    "nn.functional.softshrink", "nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss",
    "nn.functional.dropout", "max.reduction_no_dim", "min.reduction_no_dim", "median", "nanmedian",
)  # fmt: skip
EVERY = 12
"""Of all other ops the long test takes every how many-th."""


@pytest.fixture
def sweep(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module("op_sweep")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MENDED)
def test_an_op_that_was_put_right_gives_eagers_bits(sweep: ModuleType, name: str) -> None:
    dtype = torch.bfloat16 if name == "nn.functional.dropout" else torch.float32
    found = [v for case in sweep.cases([name], 2 if "dropout" in name else 1, [dtype]) for v in sweep.judge(case)]
    assert found
    assert [v for v in found if v.outcome not in (sweep.IDENTICAL, sweep.UNPLANNED)] == []
    assert any(v.outcome == sweep.IDENTICAL for v in found)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_record_says_what_is_not_identical_by_name(
    sweep: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep.json"
    monkeypatch.setattr("sys.argv", ["op_sweep.py", f"--out={out}", "--only", "mul", "to_sparse"])
    sweep.main()
    assert "to_sparse float32 train_step: refused" in capsys.readouterr().out
    record = json.loads(out.read_text())
    assert record["counts"]["train_step"] == {"identical": 2, "refused": 1}
    assert {v.op for v in sweep.read(out) if v.outcome == "identical"} == {"mul"}
    assert "to_sparse" in sweep.table(out)


def test_a_difference_in_the_last_bit_or_in_the_sign_of_zero_is_one(sweep: ModuleType) -> None:
    one = sweep.Numbers([torch.tensor([0.0, 1.0])], [None])
    assert not one.differences(sweep.Numbers([torch.tensor([0.0, 1.0])], [torch.zeros(2)])), "no gradient is zeros"
    assert one.differences(sweep.Numbers([torch.tensor([-0.0, 1.0])], [None])) == "outputs by 0.0e+00"
    assert "gradients" in one.differences(sweep.Numbers([torch.tensor([0.0, 1.0])], [torch.ones(2)]))


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_every_twelfth_op_is_as_the_record_says(sweep: ModuleType) -> None:
    known = {(v.op, v.dtype, v.door): v.outcome for v in sweep.read(sweep.RESULTS)}
    names = sorted({op for op, _, _ in known})[::EVERY]
    for case in sweep.cases(names, 1):
        for verdict in sweep.judge(case):
            assert verdict.outcome in (sweep.IDENTICAL, known[verdict.op, verdict.dtype, verdict.door]), verdict
