"""DNNMem's jobs in MXNet and TensorFlow: what the paper measured comes out; PyTorch's are in the long suite's counts."""

from __future__ import annotations

import pytest

from overspill_papers.papers import Claim, Lab, claims_of, dnnmem, paper_named, results
from overspill_papers.papers.dnnmem_tables import FRAMEWORKS, load

CLAIMS = {(claim.where, claim.what): claim for claim in claims_of(paper_named("dnnmem"))}


def found(where: str, what: str) -> float:
    (result,) = results((CLAIMS[where, what],), Lab())
    assert result.ours is not None, result.trouble
    return result.ours


def within(claim: Claim, share: float) -> bool:
    return abs(found(claim.where, claim.what) / claim.value - 1) <= share


def test_the_regions_of_tensorflows_allocator_are_those_that_were_measured() -> None:
    for batch in (64, 128):
        claim = CLAIMS["Table 8", f"VGG16 ({batch}), TensorFlow: total"]
        assert within(claim, 0.005)  # a region more or less would be 5 % and more
        assert within(CLAIMS["Table 8", f"VGG16 ({batch}), TensorFlow: live tensors"], 0.05)


def test_tensorflows_networks_are_as_small_as_measured_only_with_batch_norm_in_place() -> None:
    assert within(CLAIMS["Table 6", "ResNet50 (128), TensorFlow"], 0.02)
    device = dnnmem.load_device("p40")
    trained = dnnmem.at_batch(dnnmem.load(dnnmem.GRAPHS / "resnet50.json.gz"), 128)
    assert dnnmem.record_graph(trained, device).peak_requested_bytes > 9 * dnnmem.GIB


def test_mxnets_networks_take_what_was_measured() -> None:
    assert within(CLAIMS["Table 6", "ResNet50 (128), MXNet"], 0.04)
    assert within(CLAIMS["Table 6", "InceptionV3 (128), MXNet"], 0.04)


def test_shape_inference_says_what_the_paper_says_it_does() -> None:
    rows = [claim for (_, what), claim in CLAIMS.items() if what.endswith("Shape Inference") and "BERT" not in what]
    assert len(rows) == 6
    assert all(within(claim, 0.1) for claim in rows)


@pytest.mark.parametrize(
    ("graph", "parameters"), [("vgg16", 138_357_544), ("resnet50", 25_557_032), ("bert-32", 109_483_778)]
)
def test_a_stored_graph_trains_all_parameters(graph: str, parameters: int) -> None:
    step = dnnmem.at_batch(dnnmem.load(dnnmem.GRAPHS / f"{graph}.json.gz"), 8)
    assert dnnmem.record_graph(step, dnnmem.load_device("p40"), iterations=1).parameters == parameters


def test_every_measured_cell_is_a_row() -> None:
    cells = [row for framework in FRAMEWORKS for row in load(framework) if row.source.startswith("Table")]
    rows = [what for (where, what) in CLAIMS if where in {"Table 6", "Table 7"} and "Shape" not in what]
    assert len(cells) == len(rows) == 27
