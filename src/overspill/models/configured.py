"""Models of the sizes that their name gives: `decoder:width=2048,depth=24,heads=16`, `hf:gpt2,n_layer=6`, `hf:config.json`.

`decoder` is the built-in decoder of `gpt2.py`; `hf` is any causal language model of transformers, made from a
configuration with random weights: nothing is downloaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean

from .job import Job, checked_size

if TYPE_CHECKING:  # names are checked without paying for torch
    from torch import Tensor, nn

DECODER, HUGGING_FACE = "decoder", "hf"
FORMS = {
    "decoder:width=768,depth=12,heads=12,vocabulary=50257,seq_len=512": "the built-in decoder in any size; these are "
    "the defaults, GPT-2's",
    "hf:PATH/config.json": "a causal language model of transformers, from its configuration",
    "hf:gpt2,n_layer=6,n_embd=384": "the same by model type and fields of its configuration",
}
"""What such names look like, and what they mean."""
_SIZES = ("width", "depth", "heads", "vocabulary", "seq_len")
_SEQ_LEN = 128


def is_configured(name: str) -> bool:
    """Whether `name` is of this kind, and not `package.module:callable`."""
    kind, _, rest = name.partition(":")
    return kind == HUGGING_FACE or (kind == DECODER and (not rest or "=" in rest))


def check_configured(name: str) -> None:
    """Raise RequestError where `name` can not be read; sizes and files are looked at when it is loaded."""
    kind, _, rest = name.partition(":")
    if kind == DECODER:
        _decoder_sizes(name)
    elif not rest:
        raise RequestError(f"{name!r} names no model; write {' or '.join(form for form in FORMS if form[:2] == 'hf')}")
    elif not rest.endswith(".json"):
        _fields(name, rest.split(",")[1:])


def load_configured(name: str, seq_len: int | None = None) -> Job:
    """The job of a decoder or of a causal language model of transformers, on `seq_len` tokens. Raises RequestError."""
    check_configured(name)
    if name.partition(":")[0] == HUGGING_FACE:
        return _hugging_face(name, seq_len)
    from .gpt2 import build_decoder  # noqa: PLC0415  # imports torch

    sizes = _decoder_sizes(name)
    named = sizes.pop("seq_len", None)
    if named is not None and seq_len is not None and named != seq_len:
        raise RequestError(f"{name} says how long its sequences are; leave seq_len={seq_len} out")
    return build_decoder(name, sizes, named or seq_len)


def _decoder_sizes(name: str) -> dict[str, int]:
    fields = _fields(name, [part for part in name.partition(":")[2].split(",") if part])
    for key, value in fields.items():
        if key not in _SIZES:
            raise RequestError(f"{name}: a decoder has no {key!r}; it has {', '.join(map(repr, _SIZES))}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RequestError(f"{name}: {key} must be a positive whole number, not {value}")
    return fields


def _fields(name: str, parts: list[str]) -> dict[str, Any]:
    """`key=value` each; a value is a number, true or false, or else text."""
    fields: dict[str, Any] = {}
    for part in parts:
        key, equals, text = part.partition("=")
        if not equals or not key.isidentifier() or not text:
            raise RequestError(f"{name}: cannot read {part!r}; write key=value, with commas between")
        fields[key] = _value(text)
    return fields


def _value(text: str) -> int | float | bool | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


# -- transformers


def _hugging_face(name: str, seq_len: int | None) -> Job:
    try:
        import transformers  # noqa: PLC0415  # an optional package
    except ImportError as error:
        raise RequestError(f"{name} needs the transformers package: pip install transformers") from error
    config = _config(name, transformers.AutoConfig, list(transformers.CONFIG_MAPPING))
    config.use_cache = False  # of keys and values, which is for generation
    text = config.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    length = checked_size(name, "seq_len", seq_len, default=min(_SEQ_LEN, positions or _SEQ_LEN), maximum=positions)
    window = getattr(text, "sliding_window", None)
    attention = "sdpa" if window is not None and window < length else _causal_attention(transformers)
    module = _made(name, config, attention, transformers.AutoModelForCausalLM)
    module.train()
    if getattr(module, "loss_type", "") is None:
        module.loss_type = "ForCausalLM"  # what transformers takes then, with a warning that Dynamo cannot trace
    return Job(name, module, _token_batches(text.vocab_size, length), own_loss)


def _made(name: str, config: Any, attention: str, auto: Any) -> nn.Module:
    """The model, with transformers' own attention where it knows no other for this one."""
    try:
        try:
            return auto.from_config(config, attn_implementation=attention)
        except KeyError:  # a model with a class of its own for each attention that it has
            return auto.from_config(config, attn_implementation="sdpa")
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            return auto.from_config(config, attn_implementation="eager")
    except Exception as error:  # a configuration can be wrong in any way
        raise RequestError(f"{name}: transformers cannot make a causal language model of it: {_line(error)}") from error


def _causal_attention(transformers: Any) -> str:
    """The name of torch's attention without any mask but the causal one, for batches that are neither padded nor packed.

    Under "sdpa" transformers looks into the batch for padding and packing, but not while it is traced; it then makes a
    mask, with other kernels and other bits. It makes none for an attention that no mask function is registered for.
    """
    transformers.AttentionInterface.register("causal_sdpa", transformers.AttentionInterface()["sdpa"])
    return "causal_sdpa"


def _config(name: str, auto: Any, known: list[str]) -> Any:
    """The configuration that `name` gives: a file, or a model type with fields that differ from its defaults."""
    rest = name.partition(":")[2]
    if rest.endswith(".json"):
        path = Path(rest).expanduser()
        if not os.path.isfile(path):  # noqa: PTH113 - which raises nothing for a name that cannot be one
            raise RequestError(f"{name}: there is no file {path}; name a config.json that is there")
        try:
            return auto.from_pretrained(path)
        except Exception as error:  # whatever transformers makes of a file that is not its own
            raise RequestError(
                f"{name}: not a configuration of transformers, as config.json is: {_line(error)}"
            ) from error
    model_type, *parts = rest.split(",")
    if model_type not in known:
        guess = did_you_mean(model_type, known, most=3)
        raise RequestError(f"{name}: transformers has no model type {model_type!r}{guess}")
    fields = _fields(name, parts)
    plain = auto.for_model(model_type)
    if unknown := [key for key in fields if not hasattr(plain, key)]:
        raise RequestError(
            f"{name}: the configuration of {model_type} has no {' and no '.join(unknown)}; leave that out"
        )
    try:
        return auto.for_model(model_type, **fields)
    except Exception as error:
        raise RequestError(f"{name}: {_line(error)}") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def own_loss(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Returns the loss that the model itself gives: the mean cross entropy of each position's next token."""
    return module(input_ids=input_ids, labels=labels).loss


def _token_batches(vocabulary: int, seq_len: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    import torch  # noqa: PLC0415

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch_size, seq_len), device="cpu")
        return text, text.clone()  # two storages of their own, or the inputs of a captured graph would alias

    return make_batch
