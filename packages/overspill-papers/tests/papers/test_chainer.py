"""A step in Chainer's blocks: by hand on two layers, and the paper's optimum to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from overspill.devices import load_device
from overspill.job import Job
from overspill.models import BuiltModel
from overspill.placement import Events, replay
from overspill.policies import policy_named
from overspill.runtime.capture_job import step_graph
from overspill_papers.papers import Lab, claims_of, paper_named, results, seq2seq
from overspill_papers.papers.chainer import WORKSPACE_BYTES, as_chainer, held_bytes, inference_trace, training_trace


def small_job() -> BuiltModel:
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
    return BuiltModel("by hand", module, lambda batch: (torch.randn(batch, 3, 16, 16),), lambda m, x: m(x).sum())


def test_inference_holds_what_is_still_read_and_a_workspace_beside_each_convolution() -> None:
    graph = as_chainer(step_graph(Job(small_job, 2)))
    trace = inference_trace(graph)
    image, map_ = 2 * 3 * 16 * 16 * 4, 2 * 8 * 16 * 16 * 4
    assert sorted(b.nbytes for b in trace.blocks) == sorted([512, image, map_, map_, WORKSPACE_BYTES])  # 512: the sum
    assert trace.lower_bound_bytes == image + map_ + WORKSPACE_BYTES
    assert held_bytes(graph, training=False) == 1024 + 512  # a weight of 864 bytes and 8 biases


def test_training_keeps_every_map_to_the_end_of_backward() -> None:
    graph = as_chainer(step_graph(Job(small_job, 2)))
    trace = training_trace(graph, policy_named("in-core").plan(graph, load_device("p100-nvlink")))
    end = max(block.end for block in trace.blocks)
    relu = next(block for block in trace.blocks if block.name == "relu")
    backward = next(block for block in trace.blocks if block.name == "threshold_backward")
    assert relu.end >= backward.end
    assert [b.name for b in trace.blocks if (b.start, b.end) == (0, end)] == ["0"]  # the images
    assert all(block.nbytes % 512 == 0 for block in trace.blocks)


def test_the_optimum_of_alexnets_inference_is_the_papers_to_the_byte() -> None:
    claims = [c for c in claims_of(paper_named("placement"), "§5.2") if c.what.startswith("AlexNet")]
    assert [result.ours for result in results(tuple(claims), Lab())] == [10_169_344, 10_169_344]


def test_translation_takes_gathered_weights_twice_in_the_pool_and_once_in_the_arena() -> None:
    trace = seq2seq.inference(20)
    weights = seq2seq.LSTM
    scores = 4 * seq2seq.VOCABULARY
    assert weights == 4 * sum(weight.numel() for weight in nn.LSTM(1024, 1024, 3, device="meta").parameters())
    assert weights < trace.lower_bound_bytes < weights + 4 * scores
    pool = replay(Events.of(trace), "chainer").peak_reserved_bytes
    assert 2 * weights < pool < 2 * weights + 4 * scores


def test_steps_in_turn_need_what_the_largest_needs() -> None:
    steps = [seq2seq.training(lengths) for lengths in ([3, 4], [9, 1], [2])]
    in_turn = seq2seq.in_turn(steps)
    assert in_turn.lower_bound_bytes == max(step.lower_bound_bytes for step in steps)
    assert len(in_turn.blocks) == sum(len(step.blocks) for step in steps)


@pytest.mark.long
def test_chainers_examples_train() -> None:
    from overspill_papers.papers.chainer import alexnet, googlenet

    for build, side in ((alexnet, 227), (googlenet, 224)):
        module, make_batch, loss = build()
        images, labels = make_batch(1)
        assert images.shape == (1, 3, side, side)
        with torch.no_grad():
            value = loss(module(images), images, labels)
        assert isinstance(value, Tensor)
        assert value.isfinite()
