"""Models of transformers that read images or sound besides text train on the batches made for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import overspill
from overspill.capture.recording.recorder import Recorder
from overspill.capture.virtual_gpu.record import record
from overspill.capture.virtual_gpu.values import real_values
from overspill.core.errors import RequestError, UnsupportedError
from overspill.models import BuiltModel, load

pytest.importorskip("transformers")
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14, "projection_dim": 32,
}  # fmt: skip
GRID = {
    "depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "patch_size": 14, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "intermediate_size": 64, "out_hidden_size": 32, "mlp_ratio": 2,
}  # fmt: skip
ROTARY = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
QWEN = {
    "vision_config": GRID, "text_config": {**TEXT, "rope_scaling": ROTARY, "rope_parameters": ROTARY},
    "image_token_id": 120, "vision_start_token_id": 121, "vision_end_token_id": 122, "video_token_id": 123,
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
CONFIGURATIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "llava": (
        16,
        {
            "vision_config": {"model_type": "clip_vision_model", **VISION},
            "text_config": {"model_type": "llama", **TEXT},
            "image_token_index": 120,
        },
    ),
    "paligemma": (
        16,
        {
            "vision_config": SIGLIP, "text_config": {"model_type": "gemma", **TEXT}, "image_token_index": 120,
            "projection_dim": 32,
        },
    ),
    "gemma3": (
        4,
        {"vision_config": SIGLIP, "text_config": TEXT, "image_token_index": 120, "mm_tokens_per_image": 4},
    ),
    "internvl": (
        4,
        {
            "vision_config": {**VISION, "image_size": [56, 56], "patch_size": [14, 14]},
            "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": 120,
        },
    ),
    "qwen2_vl": (4, QWEN),
    "qwen2_5_vl": (4, QWEN),
    "smolvlm": (
        4,
        {
            "vision_config": VISION, "image_token_id": 120, "scale_factor": 2,
            "text_config": {"model_type": "llama", **TEXT, "pad_token_id": 0, "max_position_embeddings": 200},
        },
    ),
    "qwen3_vl": (4, {**QWEN, "vision_config": {**GRID, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}}),
}  # fmt: skip
CONFIGURATIONS["idefics3"] = CONFIGURATIONS["smolvlm"]
OFTEN = ("paligemma", "qwen2_vl")
ROBOT = {
    "vlm_config": {"model_type": "paligemma", **CONFIGURATIONS["paligemma"][1], "image_token_id": 128},
    "dit_config": {"model_type": "gemma", **TEXT},
}
RESNET = {
    "model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8, "out_features": ["stage1"],
    "layer_type": "basic",
}  # fmt: skip
DETECTOR = {
    "use_timm_backbone": False, "backbone_config": RESNET, "d_model": 32, "num_queries": 10,
    **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 1), ("ffn_dim", 32))},
}  # fmt: skip
SIZED = {"image_size": 56}


def configured(kind: str, folder: Path, **fields: Any) -> str:
    """The name of a small model of that type."""
    text = {"model_type": kind, **(fields or CONFIGURATIONS[kind][1])}
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return f"hf:{folder}"


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.long) for k in CONFIGURATIONS]
)
def test_each_sample_has_the_image_tokens_that_the_model_makes_of_its_image(kind: str, tmp_path: Path) -> None:
    name, tokens = configured(kind, tmp_path), CONFIGURATIONS[kind][0]
    size = SIZED if "qwen" in kind or kind in ("smolvlm", "idefics3") else {}
    built = load(name, seq_len=tokens + 6, **size)
    assert f"56x56 pixels ({tokens} tokens)" in built.assumed
    _, ids, labels, *_ = batch = built.make_batch(3)
    assert ids.shape == (3, tokens + 6)
    assert (ids == 120).sum(1).tolist() == [tokens] * 3
    assert (labels >= 0).sum(1).tolist() == [6] * 3
    loss = built.loss(built.module, *batch)
    loss.backward()
    assert loss.isfinite()
    assert any(p.grad is not None for n, p in built.module.named_parameters() if "vis" in n)  # the image counts
    with pytest.raises(RequestError, match="too small"):
        load(name, seq_len=tokens, **size)


@pytest.mark.long
def test_all_images_of_a_batch_count_though_a_model_looks_for_padding_among_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = configured("smolvlm", tmp_path)
    built = load(name)
    assert "224x224 pixels in 17 tiles (68 tokens)" in built.assumed
    with pytest.raises(RequestError, match="more than"):
        load(name, image_size=56 * 8)
    monkeypatch.setattr(real_values, "_MOST", 1 << 12)  # as in a larger batch, whose masks are not kept
    kept = forward_bytes(lambda: load(name))
    assert kept[0] == pytest.approx(kept[1], rel=0.02)
    with pytest.raises(UnsupportedError, match=r"modeling_smolvlm.py, line") as refused:  # which indexes by that
        overspill.plan(name, batch=2)
    assert len(str(refused.value).splitlines()) == 1
    assert "overspill.compile" in str(refused.value)


def forward_bytes(make: Callable[[], BuiltModel], batch: int = 4) -> tuple[int, int]:
    """The bytes that a forward leaves, of a real run on the CPU and of one that is recorded, without their attention."""
    built = make()
    own = built.make_batch(batch)
    with torch.autograd.profiler.profile(profile_memory=True) as profile, sdpa_kernel(SDPBackend.MATH):
        loss = built.loss(built.module, *own)
    events = profile.kineto_results.events()
    real = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del loss
    found = []

    def program(recorder: Recorder) -> None:
        model = make()
        model.module.to("cuda")
        with recorder.fabricating():
            inputs = model.make_batch(batch)
            real_values.know_nonzero(inputs[0])
        there = [tensor.to("cuda") for tensor in inputs]
        before = recorder.live_bytes
        with sdpa_kernel(SDPBackend.MATH):
            loss = model.loss(model.module, *there)
        found.append(recorder.live_bytes - before)
        del loss

    record(program, lines=False)
    return real, found[0]


def test_pi0_learns_actions_from_its_cameras(tmp_path: Path) -> None:
    name = configured("pi0", tmp_path, **ROBOT)
    built = load(name)
    _, cameras, ids, *_, actions = batch = built.make_batch(2)
    assert (ids == 128).sum(1).tolist() == [16 * cameras.shape[1]] * 2
    built.loss(built.module, *batch).backward()
    assert built.module.action_out_proj.weight.grad.isfinite().all()
    assert actions.shape == (2, 50, 32)
    kept = forward_bytes(lambda: load(name))
    assert kept[0] == pytest.approx(kept[1], rel=0.02)
    (tmp_path / "config.json").write_text('{"type": "pi0", "n_obs_steps": 1}', encoding="utf-8")  # of lerobot
    with pytest.raises(RequestError, match="hf:pi0"):
        load(name)


def test_a_detector_is_estimated_though_it_matches_boxes_by_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = pytest.importorskip("transformers.loss.loss_for_object_detection")

    def linear_sum_assignment(costs: Any) -> tuple[Any, Any]:
        pairs = np.arange(min(np.asarray(costs).shape))
        return pairs, pairs[::-1].copy()

    monkeypatch.setattr(losses, "linear_sum_assignment", linear_sum_assignment, raising=False)  # scipy's
    monkeypatch.setattr(losses, "requires_backends", lambda *_: None)
    name = configured("detr", tmp_path, **DETECTOR)
    built = load(name, image_size=64)
    built.loss(built.module, *built.make_batch(2)).backward()
    monkeypatch.setattr(real_values, "_MOST", 1 << 12)
    kept = forward_bytes(lambda: load(name, image_size=64))
    assert kept[0] == pytest.approx(kept[1], rel=0.05)


@pytest.mark.long
def test_an_image_and_text_model_is_estimated_by_its_configuration(tmp_path: Path) -> None:
    name = configured("paligemma", tmp_path)
    small, large = (overspill.estimate(name, batch=batch, optimizer="sgd") for batch in (2, 8))
    assert small.total_bytes < large.total_bytes


@pytest.mark.parametrize(("kind", "size"), [("qwen2_vl", 50), ("paligemma", 56)])
def test_an_image_size_that_the_model_cannot_have_is_refused(kind: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="image_size"):
        load(configured(kind, tmp_path), image_size=size)


def test_a_type_of_other_inputs_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "idefics2", "vision_config": VISION, "text_config": {"model_type": "mistral", **TEXT}}
    (tmp_path / "config.json").write_text(json.dumps(text), encoding="utf-8")
    with pytest.raises(RequestError, match="is not known"):
        load(f"hf:{tmp_path}")


def test_whisper_reads_a_spectrogram_and_writes_text() -> None:
    sizes = ",".join(
        f"{side}_{what}" for side in ("encoder", "decoder") for what in ("layers=1", "ffn_dim=16", "attention_heads=2")
    )
    name = (
        f"hf:whisper,d_model=16,vocab_size=64,max_source_positions=20,{sizes},decoder_start_token_id=1,pad_token_id=0"
    )
    built = load(name, seq_len=7)
    sound, labels = batch = built.make_batch(2)
    assert (sound.shape, labels.shape) == ((2, 80, 40), (2, 7))
    loss = built.loss(built.module, *batch)
    assert torch.isfinite(loss)
    with pytest.raises(RequestError, match="is not known"):
        load("hf:speech_to_text,d_model=16")
