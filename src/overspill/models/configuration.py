"""Read configurations of transformers' models: their files, their sizes, and how their weights are quantised.

Nothing here imports torch or transformers, or runs code of a model.
"""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from overspill.core.errors import RequestError
from overspill.core.files import read_whole

from .fields import parsed_fields

MOST_REPEATED = 1 << 14
"""Most layers or experts of a model: each may be a module, and takes a millisecond to make."""
_REPEATED = re.compile("(n|num)_(.*_)?(layers?|blocks|experts)|(.*_)?(layers|depths?|blocks|experts)")
_PATIENCE_SECONDS = 10
PUBLISHED = {
    f"{path.parent.name}/{path.stem}": path for path in sorted((Path(__file__).parent / "published").glob("*/*.json"))
}
"""Configurations of models that many train, by their names on the Hub: they need no network and no login."""
SHORT = {name.partition("/")[2].lower(): name for name in PUBLISHED}
"""Their names without the owner."""
_VARIANT = re.compile("-(Instruct|Base)(?=-|$)|(?<=/)Meta-", re.IGNORECASE)
"""What a name has more where the sizes are the same."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of linear layers are quantised."""

    kind: str
    """A choice of Job's `quantize`."""
    kept: tuple[str, ...] | None = None
    """Layers that are not quantised, by name; None: those that transformers chooses."""
    compute: str | None = None
    """The dtype of products; None: the job's."""


def located(name: str) -> tuple[Path | None, dict[str, Any]]:
    """Return the file of the configuration that `name` gives, and the fields that follow; no file for a model type.

    For a name on the Hub it is the cached file, one of PUBLISHED, or is downloaded. Raises RequestError.
    """
    rest = name.partition(":")[2]
    source, *parts = [rest] if rest.endswith(".json") else rest.split(",")
    fields, path = parsed_fields(name, parts), Path(source).expanduser()
    if os.path.isdir(source):  # noqa: PTH112 - which raises nothing for a name that cannot be one
        return path / "config.json", fields
    if not rest.endswith(".json"):
        return _on_hub(name, source) if "/" in source else None, fields
    if not os.path.isfile(path):  # noqa: PTH113 - as above
        raise RequestError(f"{name}: there is no file {path}; name a config.json that is there")
    return path, fields


def _on_hub(name: str, source: str) -> Path:
    try:
        import huggingface_hub as hub  # noqa: PLC0415  # an optional package
        from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415
    except ImportError as error:
        raise RequestError(f"{name} needs the transformers package: pip install transformers") from error
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity(logging.ERROR)  # or it tells of each retry
    try:
        if isinstance(cached := hub.try_to_load_from_cache(source, "config.json"), str):
            return Path(cached)
        if known := published(source):
            return PUBLISHED[known]
        # One try, for the hub's own are six and take half a minute.
        hub.get_session().head(hub.hf_hub_url(source, "config.json"), timeout=_PATIENCE_SECONDS)
        return Path(hub.hf_hub_download(source, "config.json"))
    except Exception as error:  # no network, no such model, one that wants a login
        raise RequestError(
            f"{name}: its configuration cannot be had: {one_line(error)}; download its config.json, and name that: "
            "hf:config.json"
        ) from error
    finally:
        hub_logging.set_verbosity(level)


def published(name: str) -> str | None:
    """Return the name in PUBLISHED of the model that has the sizes of `name`, which may leave the owner out."""
    owner, _, plain = _VARIANT.sub("", name).lower().rpartition("/")
    known = SHORT.get(plain)
    return known if known and owner in ("", known.partition("/")[0].lower()) else None


def settings_of(name: str) -> dict[str, Any]:
    """Return the configuration that `name` gives, from its file and the fields in the name.

    Raises RequestError if it is no configuration, or has more layers than any model.
    """
    path, fields = located(name)
    try:
        found = ({} if path is None else {**json.loads(read_whole(path))}) | fields
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(
            f"{name}: not a configuration of transformers, as config.json is: {one_line(error)}; name one"
        ) from None
    check_repeated(name, found)
    return found


def check_repeated(name: str, fields: dict[str, Any]) -> None:
    """Raise RequestError for a field with more layers than can be made, or with a negative number."""
    for key, value in fields.items():
        if isinstance(value, dict):
            check_repeated(name, value)
        for count in value if isinstance(value, list) else [value]:
            if _REPEATED.fullmatch(key) and isinstance(count, int) and not 0 <= count <= MOST_REPEATED:
                raise RequestError(f"{name}: {key}={count} cannot be made here; give 0 to {MOST_REPEATED}")


def quantization_of(name: str) -> Quantization | None:
    """Return how the configuration that `name` gives quantises weights. Raises RequestError for an unknown method."""
    said = settings_of(name).get("quantization_config")
    if not said or (isinstance(said, dict) and said.get("dequantize")):
        return None
    method = said.get("quant_method", "bitsandbytes") if isinstance(said, dict) else said
    try:  # fields and defaults: transformers/utils/quantization_config.py, 5.23, `BitsAndBytesConfig`
        eight, double = said.get("load_in_8bit"), said.get("bnb_4bit_use_double_quant")
        compute = str(said.get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
        skipped = said.get("llm_int8_skip_modules")
        kept = None if skipped is None else tuple(re.compile(key).pattern for key in list.copy(skipped))
        known = said.get("load_in_4bit") or (eight and not said.get("llm_int8_has_fp16_weight"))
    except (AttributeError, TypeError, re.error):
        known = False
    if method != "bitsandbytes" or not known or compute not in ("float32", "bfloat16", "float16"):
        raise RequestError(
            f"{name}: its quantization_config ({method}) is not known here as it is set; known are 4 and 8 bits of "
            "bitsandbytes; "
            "to estimate it dequantised, write hf:FOLDER,quantization_config=false",
            fields=["model"],
        )
    if eight:
        return Quantization("8bit", kept)
    return Quantization("4bit-double" if double else "4bit-single", kept, compute)


def one_line(error: Exception) -> str:
    """Return the message of `error`, for an error of one line."""
    return " ".join(str(error).split())[:300].rstrip(".")
