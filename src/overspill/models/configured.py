"""Models whose name gives their sizes, as `decoder:width=2048,depth=24,heads=16`, and those of `hugging_face.py`."""

from __future__ import annotations

import re

from overspill.core.errors import RequestError

from .built_model import BuiltModel
from .configuration import SHORT, check_repeated, published
from .fields import parsed_fields

DECODER, HUGGING_FACE = "decoder", "hf"
FORMS = {
    "decoder:width=768,depth=12,heads=12,vocabulary=50257,seq_len=512": "the built-in decoder in any size; these are "
    "the defaults, GPT-2's",
    "hf:PATH/config.json": "a model of transformers, from its configuration: of text, images, both, sound or boxes",
    "hf:gpt2,n_layer=6,n_embd=384": "the same by model type and fields of its configuration",
    "mistralai/Mistral-7B-v0.1": "the same by its name on the Hub, from which the configuration alone is read",
    "llama-3.1-8b": "the same without a network or a login, for " + ", ".join(SHORT),
}
"""The forms of such names, and their meaning."""
_ON_HUB = re.compile(r"[\w.-]+/[\w.-]+(?<!\.py)")
_SIZES = ("width", "depth", "heads", "vocabulary", "seq_len")


def full_name(name: str) -> str:
    """Return `name`, or what it is short for: `hf:owner/name` for a name on the Hub or of `PUBLISHED`."""
    if ":" in name:
        return name
    source, comma, fields = name.partition(",")
    known = source if "/" in source else published(source)
    return f"{HUGGING_FACE}:{known}{comma}{fields}" if known and _ON_HUB.fullmatch(known) else name


def is_configured(name: str) -> bool:
    """Return whether `name` gives a configuration, not `package.module:callable`."""
    kind, _, rest = name.partition(":")
    return kind == HUGGING_FACE or (kind == DECODER and (not rest or "=" in rest))


def check_configured(name: str) -> None:
    """Raise RequestError if `name` cannot be parsed.

    Sizes and files are checked when it is loaded.
    """
    kind, _, rest = name.partition(":")
    if kind == DECODER:
        _decoder_sizes(name)
    elif not rest:
        raise RequestError(f"{name!r} names no model; write {' or '.join(form for form in FORMS if form[:2] == 'hf')}")
    elif not rest.endswith(".json"):
        parsed_fields(name, rest.split(",")[1:])


def load_configured(name: str, seq_len: int | None = None, image_size: int | None = None) -> BuiltModel:
    """Return a decoder or a model of transformers, on `seq_len` tokens and images of `image_size`.

    Raises RequestError.
    """
    check_configured(name)
    if name.partition(":")[0] == HUGGING_FACE:
        from .hugging_face import load_hugging_face  # noqa: PLC0415  # imports torch

        return load_hugging_face(name, seq_len, image_size)
    from .gpt2 import build_decoder  # noqa: PLC0415  # imports torch

    if image_size is not None:
        raise RequestError(f"image_size= does not apply to {name}, which reads text; leave it out")
    sizes = _decoder_sizes(name)
    named = sizes.pop("seq_len", None)
    if named is not None and seq_len is not None and named != seq_len:
        raise RequestError(f"{name} says how long its sequences are; leave seq_len={seq_len} out")
    return build_decoder(name, sizes, named or seq_len)


def _decoder_sizes(name: str) -> dict[str, int]:
    fields = parsed_fields(name, [part for part in name.partition(":")[2].split(",") if part])
    for key, value in fields.items():
        if key not in _SIZES:
            raise RequestError(f"{name}: a decoder has no {key!r}; it has {', '.join(map(repr, _SIZES))}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name}: {key} must be a positive whole number, not {value}")
    check_repeated(name, fields)
    return fields
