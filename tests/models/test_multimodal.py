"""Models of transformers that read images or sound besides text train on the batches made for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import overspill
from overspill.core.errors import RequestError
from overspill.models import load

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
    "qwen3_vl": (4, {**QWEN, "vision_config": {**GRID, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}}),
}  # fmt: skip
OFTEN = ("paligemma", "qwen2_vl")


def configured(kind: str, folder: Path) -> str:
    """The name of a small model of that type."""
    text = {"model_type": kind, **CONFIGURATIONS[kind][1]}
    (folder / "config.json").write_text(json.dumps(text), encoding="utf-8")
    return f"hf:{folder}"


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in OFTEN else pytest.mark.long) for k in CONFIGURATIONS]
)
def test_each_sample_has_the_image_tokens_that_the_model_makes_of_its_image(kind: str, tmp_path: Path) -> None:
    name, tokens = configured(kind, tmp_path), CONFIGURATIONS[kind][0]
    size = {"image_size": 56} if "qwen" in kind else {}
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


def test_an_image_and_text_model_is_estimated_by_its_configuration(tmp_path: Path) -> None:
    name = configured("paligemma", tmp_path)
    small, large = (overspill.estimate(name, batch=batch, optimizer="sgd") for batch in (2, 8))
    assert small.total_bytes < large.total_bytes


@pytest.mark.parametrize(("kind", "size"), [("qwen2_vl", 50), ("paligemma", 56)])
def test_an_image_size_that_the_model_cannot_have_is_refused(kind: str, size: int, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="image_size"):
        load(configured(kind, tmp_path), image_size=size)


def test_a_type_of_other_inputs_is_refused(tmp_path: Path) -> None:
    text = {"model_type": "smolvlm", "vision_config": VISION, "text_config": {"model_type": "llama", **TEXT}}
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
