"""Batches for models of transformers that read images or sound besides text, or boxes and actions with images.

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
TILES = 4
"""Tiles up and across that an image is cut in, of SmolVLM and Idefics 3; a small copy of it makes one more.

Their processors' default, for a square image: transformers/models/idefics3/image_processing_idefics3.py, 5.23.
"""
DETECTED_IMAGE, BOXES = 800, 7
"""Pixels of an image's sides, which DETR's processor gives the shorter one, and objects in it, the mean of COCO's."""
CAMERAS, COMMAND = 3, 48
"""Images and tokens of text of a sample of pi0, as its authors train it (openpi, `max_token_len`)."""
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
    mask: Callable[[int], Tensor] | None = None
    """`pixel_attention_mask`: which pixels are no padding."""
    cut: str = ""
    """Into what it is cut, in words."""


def images_and_text(
    name: str, module: nn.Module, config: Any, seq_len: int | None, image_size: int | None
) -> ModelInputs:
    """Return the inputs of a model that reads one image and text, `seq_len` tokens in all.

    Without `seq_len` the text has SEQ_LEN tokens or what is left. Raises RequestError for a model type whose inputs are
    not known, and for sizes that it cannot have.
    """
    if config.model_type == "pi0":
        return _images_and_actions(name, config, seq_len, image_size)
    image = _image_of(name, config, image_size)
    text = config.get_text_config()
    positions = max(getattr(text, "max_position_embeddings", None) or 0, 0) or None
    if positions is not None and image.tokens >= positions:
        raise RequestError(
            f"{name}: an image of {image.sides[0]}x{image.sides[1]} pixels has {image.tokens} tokens, more than its "
            f"{positions} positions leave to text; give a smaller image_size="
        )
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
        labels = ids.masked_fill(of_image, IGNORED)
        masks = () if image.mask is None else (image.mask(batch_size),)
        return (image.pixels(batch_size), ids, labels, *(of_image.long() for _ in types), *masks)

    height, width = image.sides
    assumed = f"each sample has one image of {height}x{width} pixels{image.cut} ({image.tokens} tokens) before its text"
    names = "pixel_values", "input_ids", "labels", *types, *(() if image.mask is None else ("pixel_attention_mask",))
    return ModelInputs(names, make_batch, assumed, image.grid)


def _image_of(name: str, config: Any, image_size: int | None) -> _Image:
    kind = config.model_type
    vision: Any = getattr(config, "vision_config", None)
    if kind in ("qwen2_vl", "qwen2_5_vl", "qwen3_vl"):
        return _gridded(name, vision, image_size)
    if kind in ("idefics3", "smolvlm"):
        return _tiled(name, config, image_size)
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


def _tiled(name: str, config: Any, image_size: int | None) -> _Image:
    """Return an image that comes as tiles of the vision model's size, and as one of that size if it is larger."""
    side = _sides(config.vision_config.image_size)[0]
    size = checked_size(name, "image_size", image_size, default=TILES * side, minimum=side, multiple=side)
    tiles = (size // side) ** 2 + (size > side)
    tokens = (side // _sides(config.vision_config.patch_size)[0]) ** 2 // config.scale_factor**2

    def pixels(batch_size: int) -> Tensor:
        return torch.randn(batch_size, tiles, 3, side, side, device="cpu")

    def mask(batch_size: int) -> Tensor:
        return torch.ones(batch_size, tiles, side, side, dtype=torch.int64, device="cpu")

    cut = f" in {tiles} tiles" if tiles > 1 else ""
    return _Image(pixels, tiles * tokens, (size, size), mask=mask, cut=cut)


def _images_and_actions(name: str, config: Any, seq_len: int | None, image_size: int | None) -> ModelInputs:
    """Return the inputs of pi0: what its cameras see, a command, the robot's state, and what it did then."""
    if image_size is not None:
        raise RequestError(f"image_size= does not apply to {name}, whose configuration has it: vlm_config")
    vision, token = config.vlm_config.vision_config, config.vlm_config.image_token_id
    side, patch = _sides(vision.image_size)[0], _sides(vision.patch_size)[0]
    seen = CAMERAS * (side // patch) ** 2
    length = checked_size(name, "seq_len", seq_len, default=seen + COMMAND, minimum=seen + 1)

    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        ids = torch.randint(1, token, (batch_size, length), device="cpu")
        ids[:, :seen] = token
        return (
            torch.randn(batch_size, CAMERAS, 3, side, side, device="cpu"),
            torch.ones(batch_size, CAMERAS, dtype=torch.bool, device="cpu"),
            ids,
            torch.ones_like(ids),
            torch.randn(batch_size, config.max_state_dim, device="cpu"),
            torch.randn(batch_size, config.chunk_size, config.max_action_dim, device="cpu"),
        )

    names = "pixel_values", "pixel_attention_mask", "input_ids", "attention_mask", "state", "actions"
    assumed = f"each sample has {CAMERAS} images of {side}x{side} pixels ({seen} tokens) before its command"
    return ModelInputs(names, make_batch, assumed)


def images_and_boxes(name: str, config: Any, image_size: int | None) -> tuple[Batches, str]:
    """Return batches of images with BOXES objects each, and what they assume, in words.

    Without `image_size` they have the sides that the configuration names, or DETECTED_IMAGE. Raises RequestError.
    """
    default = getattr(config, "image_size", None) or DETECTED_IMAGE
    height, width = _sides(default)
    if image_size is not None:
        height = width = checked_size(name, "image_size", image_size, default=height, minimum=32, multiple=32)

    def make_batch(batch_size: int) -> tuple[Tensor, ...]:
        images = torch.randn(batch_size, config.num_channels, height, width, device="cpu")
        classes = torch.randint(config.num_labels, (batch_size, BOXES), device="cpu")
        return images, classes, torch.rand(batch_size, BOXES, 4, device="cpu")

    return make_batch, f"each image has {height}x{width} pixels and {BOXES} objects"


def loss_on_boxes(module: nn.Module, images: Tensor, classes: Tensor, boxes: Tensor) -> Tensor:
    """Return the model's own loss; a box is its centre, width and height, as shares of the image."""
    labels = [{"class_labels": named, "boxes": place} for named, place in zip(classes, boxes, strict=True)]
    loss: Tensor = module(pixel_values=images, labels=labels).loss
    return loss


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
