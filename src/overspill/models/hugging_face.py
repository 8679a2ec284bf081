"""Models of transformers by configuration, with random weights.

Names are `hf:gpt2,n_layer=6`, `hf:config.json`, `hf:owner/name`. Weights are never downloaded. For a name on the Hub
the configuration is read, from the local cache or from the Hub.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from overspill.core.errors import RequestError
from overspill.core.registry import did_you_mean

from .built_model import IMAGE_SIZE, SEQ_LEN, BuiltModel, checked_size
from .configuration import located, one_line, settings_of
from .multimodal import images_and_boxes, images_and_text, loss_on_boxes, sound_and_text


class _Kind(NamedTuple):
    """A task of transformers' models, and its classes."""

    what: str
    auto: str
    """The class that makes the model."""
    mapping: str
    endings: tuple[str, ...]
    """The endings of the names of architectures of that kind."""


CAUSAL = _Kind(
    "a causal language model", "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING", ("ForCausalLM", "LMHeadModel")
)
MASKED = _Kind("a masked language model", "AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", ("ForMaskedLM",))
TEXT_TO_TEXT = _Kind(
    "a model from text to text",
    "AutoModelForSeq2SeqLM",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
    ("ForConditionalGeneration",),
)
IMAGES = _Kind(
    "an image classifier",
    "AutoModelForImageClassification",
    "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING",
    ("ForImageClassification",),
)
IMAGES_AND_TEXT = _Kind(
    "a model of images and text",
    "AutoModelForImageTextToText",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING",
    ("ForConditionalGeneration",),
)
DETECTION = _Kind(
    "a detector of objects",
    "AutoModelForObjectDetection",
    "MODEL_FOR_OBJECT_DETECTION_MAPPING",
    ("ForObjectDetection",),
)
SOUND = _Kind(
    "a model from sound to text",
    "AutoModelForSpeechSeq2Seq",
    "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING",
    ("ForConditionalGeneration",),
)


def load_hugging_face(name: str, seq_len: int | None, image_size: int | None = None) -> BuiltModel:
    """Return the model that `name` configures, with batches and loss.

    It reads `seq_len` tokens if it reads text, and images of `image_size` if it reads them of any size.
    Raises RequestError.
    """
    try:
        import huggingface_hub  # noqa: PLC0415  # as below
        import transformers  # noqa: PLC0415  # an optional package
    except ImportError as error:
        raise RequestError(f"{name} needs the transformers package: pip install transformers") from error
    settings_of(name)  # from the Hub, if it is there alone
    with patch.object(huggingface_hub.constants, "HF_HUB_OFFLINE", True):  # all else is here, and nobody is asked
        return _load(name, seq_len, image_size, transformers)


def _load(name: str, seq_len: int | None, image_size: int | None, transformers: Any) -> BuiltModel:
    config = _config(name, transformers.AutoConfig, list(transformers.CONFIG_MAPPING))
    kind = _kind(name, config, transformers)
    if image_size is not None and kind not in (IMAGES_AND_TEXT, DETECTION):
        raise RequestError(f"image_size= does not apply to {name}; its configuration has what it reads")
    if seq_len is not None and kind in (IMAGES, DETECTION):
        raise RequestError(f"seq_len= does not apply to {name}, which reads images; leave it out")
    if kind is DETECTION:
        make_batch, assumed = images_and_boxes(name, config, image_size)
        module = _made(name, config, "sdpa", kind, transformers)
        return BuiltModel(name, module, make_batch, loss_on_boxes, assumed=assumed)
    if kind is IMAGES:
        return BuiltModel(
            name, _made(name, config, "sdpa", kind, transformers), _image_batches(config), _loss_on_images
        )
    config.use_cache = False  # of keys and values, which is for generation
    if kind in (IMAGES_AND_TEXT, SOUND):
        config.get_text_config().use_cache = False
        module = _made(name, config, "sdpa", kind, transformers)
        if kind is SOUND:
            inputs = sound_and_text(name, config, seq_len)
        else:
            inputs = images_and_text(name, module, config, seq_len, image_size)
        return BuiltModel(name, module, inputs.make_batch, inputs.loss, assumed=inputs.assumed)
    if kind is TEXT_TO_TEXT and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # a type's defaults have none
    text = config.get_text_config()
    positions = max(getattr(text, "max_position_embeddings", None) or 0, 0) or None  # XLNet says -1: no limit
    length = checked_size(name, "seq_len", seq_len, default=min(SEQ_LEN, positions or SEQ_LEN), maximum=positions)
    window = getattr(text, "sliding_window", None)
    is_sparse = hasattr(text, "index_topk")  # tokens to attend to are chosen by the mask
    is_plain = kind is CAUSAL and not is_sparse and not (window is not None and window < length)
    module = _made(name, config, _causal_attention(transformers) if is_plain else "sdpa", kind, transformers)
    if getattr(module, "loss_type", "") is None:
        # What transformers takes then, with a warning that Dynamo cannot trace.
        module.loss_type = "ForCausalLM"
    padding = getattr(text, "pad_token_id", None)
    return BuiltModel(name, module, _token_batches(text.vocab_size, length, padding), _loss_on_text)


def _kind(name: str, config: Any, transformers: Any) -> _Kind:
    """Return the task that the configuration names, or that of its model type."""
    reads_text = (TEXT_TO_TEXT,) if getattr(config, "is_encoder_decoder", False) else (MASKED, CAUSAL)
    kinds = (*reads_text, IMAGES, IMAGES_AND_TEXT, DETECTION, SOUND)
    known = [kind for kind in kinds if type(config) in getattr(transformers, kind.mapping)]
    for architecture in getattr(config, "architectures", None) or ():
        for kind in known:
            if architecture.endswith(kind.endings):
                return kind
    if known:  # of a model that reads images too, transformers says that it is one of text as well
        made = {kind: getattr(transformers, kind.mapping)[type(config)] for kind in known}
        return next((kind for kind in known if kind is IMAGES_AND_TEXT and made[kind] is made[known[0]]), known[0])
    raise RequestError(
        f"{name}: of {config.model_type} transformers makes no model of text, of images, of both, from sound to "
        "text, or from images to boxes; name a function of yours that makes the model: package.module:callable"
    )


def _made(name: str, config: Any, attention: str, kind: _Kind, transformers: Any) -> nn.Module:
    """Return the model with attention `attention`, or transformers' own if unsupported."""
    auto = getattr(transformers, kind.auto)
    _in_float32(config)
    if getattr(config, "architectures", None) is None:
        config.architectures = []  # transformers goes through them, and a type's defaults have none
    try:
        try:
            module = auto.from_config(config, attn_implementation=attention, trust_remote_code=False)
        except KeyError:  # a model with a class of its own for each attention that it has
            module = auto.from_config(config, attn_implementation="sdpa", trust_remote_code=False)
        except ValueError as error:
            if "attention implementation" not in str(error):
                raise
            module = auto.from_config(config, attn_implementation="eager", trust_remote_code=False)
    except Exception as error:  # a configuration can be wrong in any way
        raise RequestError(f"{name}: transformers cannot make {kind.what} of it: {one_line(error)}") from error
    made: nn.Module = module.train()
    return made


def _in_float32(config: Any) -> None:
    """Make weights float32, whatever the configuration says of a checkpoint: the dtype of the job decides."""
    config.dtype = torch.float32
    for name in getattr(config, "sub_configs", {}):
        if (part := getattr(config, name, None)) is not None:
            _in_float32(part)


def _causal_attention(transformers: Any) -> str:
    """Return the name of torch's attention with the causal mask alone.

    It is for batches that are neither padded nor packed. Under "sdpa" transformers checks the batch for padding and
    packing, but not while it is traced. It then makes a mask, with other kernels and other bits. It makes none for an
    attention without a registered mask function.
    """
    transformers.AttentionInterface.register("causal_sdpa", transformers.AttentionInterface()["sdpa"])
    return "causal_sdpa"


# -- configurations


def _config(name: str, auto: Any, known: list[str]) -> Any:
    """Return the configuration that `name` gives, with its fields changed.

    `name` is a file, a name on the Hub, or a model type. Code that comes with a model is not run.
    """
    (path, fields), said = located(name), settings_of(name)
    kind = name.partition(":")[2].split(",")[0] if path is None else said.get("model_type")
    if kind not in known:
        hint = did_you_mean(str(kind), known, most=3)
        if kind is None and isinstance(said.get("type"), str):  # of lerobot, as pi0_base and smolvla_base have it
            own = f"its own of that name is hf:{said['type']}; or " if said["type"] in known else ""
            hint = f"; this is a configuration of lerobot's {said['type']!r}: {own}name a function of yours that makes "
            hint += "the policy and its batch, package.module:callable"
        if "auto_map" in said:
            hint = ", and code that comes with a model is not run; for a model of yours write package.module:callable"
        raise RequestError(f"{name}: transformers has no model type {kind!r}{hint}")
    try:
        config = auto.for_model(kind) if path is None else auto.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # whatever transformers makes of a file that is not its own
        raise RequestError(
            f"{name}: not a configuration of transformers, as config.json is: {one_line(error)}"
        ) from error
    fields.pop("quantization_config", None)
    if unknown := [key for key in fields if not hasattr(config, key)]:
        raise RequestError(f"{name}: the configuration of {kind} has no {' and no '.join(unknown)}; leave that out")
    try:
        if path is None:
            return auto.for_model(kind, **fields)
        config.update(fields)
    except Exception as error:
        raise RequestError(f"{name}: {one_line(error)}") from error
    return config


# -- batches and losses


def _loss_on_text(module: nn.Module, input_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss: mean cross entropy of predicted tokens."""
    loss: Tensor = module(input_ids=input_ids, labels=labels).loss
    return loss


def _loss_on_images(module: nn.Module, pixel_values: Tensor, labels: Tensor) -> Tensor:
    """Return the model's own loss."""
    loss: Tensor = module(pixel_values=pixel_values, labels=labels).loss
    return loss


def _token_batches(vocabulary: int, seq_len: int, padding: int | None) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return batches of text without padding, which some models check for."""

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocabulary, (batch_size, seq_len), device="cpu")
        if padding is not None:
            text = text.where(text != padding, (padding + 1) % vocabulary)
        return text, text.clone()  # two storages of their own, or the inputs of a captured graph would alias

    return make_batch


def _image_batches(config: Any) -> Callable[[int], tuple[Tensor, Tensor]]:
    size = getattr(config, "image_size", IMAGE_SIZE)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)

    def make_batch(batch_size: int) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch_size, channels, height, width, device="cpu")
        return images, torch.randint(config.num_labels, (batch_size,), device="cpu")

    return make_batch
