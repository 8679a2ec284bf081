"""Batches for models of transformers that read images or sound besides text.

Each sample has one image, whose tokens stand before the text, as their processors make it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError

from .built_model import IGNORED, SEQ_LEN, checked_size

GRID_IMAGE = 448
"""Pixels of an image's sides, where a model takes images of any size."""
Batches = Callable[[int], tuple[Tensor, ...]]


class ModelInputs(NamedTuple):
    """How a model is called: the names of its inputs, batches of them, and what they assume, in words."""

    names: tuple[str, ...]
    make_batch: Batches
    assumed: str
    grid: tuple[int, int] | None = None
    """Patches up and across of each image, which the model reads as values."""

    def loss(self, module: nn.Module, *inputs: Tensor) -> Tensor:
        """Return the model's own loss."""
        given = dict(zip(self.names, inputs, strict=True))
        if self.grid is not None:
            given["image_grid_thw"] = torch.tensor([[1, *self.grid]] * given["input_ids"].shape[0])
        found: Tensor = module(**given).loss
        return found


class _Image(NamedTuple):
    """The pixels of one image as a model takes them, the tokens that it becomes, and its sides in pixels."""

    pixels: Callable[[int], Tensor]
    tokens: int
    sides: tuple[int, int]
    grid: tuple[int, int] | None = None


def images_and_text(
    name: str, module: nn.Module, config: Any, seq_len: int | None, image_size: int | None
) -> ModelInputs:
    """Return the inputs of a model that reads one image and text, `seq_len` tokens in all.

    Without `seq_len` the text has SEQ_LEN tokens or what is left. Raises RequestError for a model type whose inputs are
    not known, and for sizes that it cannot have.
    """
    image = _image_of(name, config, image_size)
    text = config.get_text_config()
    positions = max(getattr(text, "max_position_embeddings", None) or 0, 0) or None
    default = image.tokens + SEQ_LEN if positions is None else min(image.tokens + SEQ_LEN, positions)
    length = checked_size(name, "seq_len", seq_len, default=default, minimum=image.tokens + 1, maximum=positions)
    accepted = inspect.signature(module.forward).parameters
    types = tuple(t for t in ("token_type_ids", "mm_token_type_ids") if t in accepted)
    token, vocabulary = config.image_token_id, text.vocab_size

    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(1, vocabulary - 1, (batch_size, length), device="cpu")
        ids += ids >= token  # no other token is that of images
        ids[:, : image.tokens] = token
        of_image = ids == token
        return (image.pixels(batch_size), ids, ids.masked_fill(of_image, IGNORED), *(of_image.long() for _ in types))

    height, width = image.sides
    assumed = f"each sample has one image of {height}x{width} pixels ({image.tokens} tokens) before its text"
    return ModelInputs(("pixel_values", "input_ids", "labels", *types), make_batch, assumed, image.grid)


def _image_of(name: str, config: Any, image_size: int | None) -> _Image:
    kind = config.model_type
    vision: Any = getattr(config, "vision_config", None)
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return _gridded(name, vision, image_size)
    if image_size is not None:
        raise RequestError(f"image_size= does not apply to {name}, whose configuration has it: vision_config")
    height, width = _sides(vision.image_size) if vision is not None and hasattr(vision, "image_size") else (0, 0)
    patches = (height // _sides(vision.patch_size)[0]) * (width // _sides(vision.patch_size)[1]) if height else 0
    tokens = {
        "llava": patches,
        "vipllava": patches,
        "paligemma": patches,
        "internvl": int(patches * getattr(config, "downsample_ratio", 1) ** 2),
        "gemma3": getattr(config, "mm_tokens_per_image", 0),
    }.get(kind)
    if not tokens:
        raise RequestError(
            f"{name}: what {kind} reads besides text is not known here; name a function of yours that makes the model "
            "and its inputs: package.module:callable"
        )

    def pixels(batch_size: int) -> Tensor:
        return torch.randn(batch_size, 3, height, width, device="cpu")

    return _Image(pixels, tokens, (height, width))


def _gridded(name: str, vision: Any, image_size: int | None) -> _Image:
    """Return an image that comes as a row for each patch, with the numbers of patches up and across."""
    merged = vision.patch_size * vision.spatial_merge_size
    default = GRID_IMAGE // merged * merged
    size = checked_size(name, "image_size", image_size, default=default, minimum=merged, multiple=merged)
    up = size // vision.patch_size
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def pixels(batch_size: int) -> Tensor:
        return torch.randn(batch_size * up * up, width, device="cpu")

    return _Image(pixels, (size // merged) ** 2, (size, size), (up, up))


def sound_and_text(name: str, config: Any, seq_len: int | None) -> ModelInputs:
    """Return the inputs of a model that reads a spectrogram and writes `seq_len` tokens. Raises RequestError."""
    if config.model_type != "whisper":
        raise RequestError(
            f"{name}: what {config.model_type} reads is not known here; name a function of yours that makes the model "
            "and its inputs: package.module:callable"
        )
    most = config.max_target_positions
    length = checked_size(name, "seq_len", seq_len, default=min(SEQ_LEN, most), maximum=most)
    frames = 2 * config.max_source_positions

    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        sound = torch.randn(batch_size, config.num_mel_bins, frames, device="cpu")
        return sound, torch.randint(config.vocab_size, (batch_size, length), device="cpu")

    return ModelInputs(("input_features", "labels"), make_batch, "")


def _sides(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return height, width
