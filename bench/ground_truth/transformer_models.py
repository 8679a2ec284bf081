r"""The language models of the xMem jobs, built from configurations written here: nothing is downloaded.

    python -m pip install --no-deps transformers==4.51.3 'tokenizers>=0.21,<0.22' 'huggingface_hub>=0.30,<1' \
        requests urllib3 idna certifi charset_normalizer --target DIR
    OVERSPILL_TRANSFORMERS=DIR python bench/...

The jobs were measured with transformers 4.51.3, and later versions keep other tensors (README.md beside this file), so
that version is asked for. OVERSPILL_TRANSFORMERS=installed takes the environment's, whatever it is.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from .beside import add_directory

MEASURED_WITH = "4.51.3"
_INSTALL = (
    f"make definitions, or python -m pip install --no-deps transformers=={MEASURED_WITH} 'tokenizers>=0.21,<0.22' 'huggingface_hub>=0.30,<1' "
    "requests urllib3 idna certifi charset_normalizer --target DIR, then set OVERSPILL_TRANSFORMERS=DIR"
)


@functools.cache
def transformers() -> ModuleType:
    """Returns the transformers module: the version the jobs were measured with, unless the environment says `installed`."""
    anything = os.environ.get("OVERSPILL_TRANSFORMERS") == "installed"
    if not anything:
        add_directory("OVERSPILL_TRANSFORMERS", first=True)
    if not anything and "transformers" in sys.modules and sys.modules["transformers"].__version__ != MEASURED_WITH:
        raise SystemExit("another version of transformers is imported already; set OVERSPILL_TRANSFORMERS before it is")
    try:
        module = importlib.import_module("transformers")
    except ImportError as error:
        raise SystemExit(f"transformers is not installed; {_INSTALL} ({error})") from error
    if module.__version__ != MEASURED_WITH and not anything:
        raise SystemExit(
            f"the jobs were measured with transformers {MEASURED_WITH}, here is {module.__version__}; {_INSTALL}"
        )
    return module


@dataclass(frozen=True)
class Network:
    """One language model: its configuration class in transformers, the automatic model class, and what is not a default."""

    config: str
    auto: str
    options: dict[str, Any] = field(default_factory=dict)


def _causal(config: str, **options: Any) -> Network:
    return Network(config, "AutoModelForCausalLM", options)


def _gpt2(layers: int, **options: Any) -> Network:
    return _causal("GPT2Config", n_layer=layers, **options)


def _t5(width: int, layers: int, heads: int) -> Network:
    sizes = {"d_model": width, "d_ff": 4 * width, "num_layers": layers, "num_heads": heads, "vocab_size": 32128}
    return Network("T5Config", "AutoModelForSeq2SeqLM", {**sizes, "decoder_start_token_id": 0})


def _llama(width: int, layers: int, heads: int) -> Network:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": 8}
    rest = {"intermediate_size": 8192, "vocab_size": 128256, "head_dim": width // heads, "tie_word_embeddings": True}
    return _causal("LlamaConfig", max_position_embeddings=131072, **sizes, **rest)


def _qwen3(width: int, inner: int, layers: int, heads: int) -> Network:
    sizes = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
    }
    return _causal(
        "Qwen3Config",
        sliding_window=None,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
        **sizes,
    )


# Named as in the data: names of the Hugging Face hub; each line is that model's config.json where it is not a default.
NETWORKS: dict[str, Network] = {
    "cerebras/Cerebras-GPT-111M": _gpt2(
        10, n_inner=3072, n_positions=2048, activation_function="gelu", attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _causal(
        "Qwen2Config",
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    ),
    "distilbert/distilgpt2": _gpt2(6),
    "EleutherAI/gpt-neo-125M": _causal(
        "GPTNeoConfig", hidden_size=768, num_layers=12, num_heads=12, attention_types=[[["global", "local"], 6]]
    ),
    "EleutherAI/pythia-1b": _causal(
        "GPTNeoXConfig",
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=8,
    ),
    "facebook/opt-125m": _causal("OPTConfig"),
    "facebook/opt-350m": _causal(
        "OPTConfig",
        hidden_size=1024,
        ffn_dim=4096,
        num_hidden_layers=24,
        num_attention_heads=16,
        word_embed_proj_dim=512,
        do_layer_norm_before=False,
    ),
    "meta-llama/Llama-3.2-1B": _llama(2048, 16, 32),
    "meta-llama/Llama-3.2-3B-Instruct": _llama(3072, 28, 24),
    "openai-community/gpt2": _gpt2(12),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 3072, 28, 16),
    "Qwen/Qwen3-4B": _qwen3(2560, 9728, 36, 32),
    "t5-base": _t5(768, 12, 12),
    "T5-small": _t5(512, 6, 8),
}


def build(name: str) -> nn.Module:
    """Returns the model of the hub's name, in float32, with random weights, in training mode."""
    if name not in NETWORKS:
        raise SystemExit(f"{name} is no model of the measured jobs; they are {', '.join(sorted(NETWORKS))}")
    network = NETWORKS[name]
    library = transformers()
    config = getattr(library, network.config)(**network.options)
    module: nn.Module = getattr(library, network.auto).from_config(config)
    module.train()
    decoder: Any = getattr(getattr(module, "model", None), "decoder", None)
    if getattr(decoder, "layerdrop", None) == 0:
        # OPT draws a random number for each layer and compares it with layerdrop, which a fake tensor cannot answer.
        # Only the flag of the decoder itself is cleared: its layers, and so their dropout, go on training.
        decoder.training = False
    return module


@contextmanager
def lines_of_unequal_length() -> Iterator[None]:
    """While this holds, a model takes it as known that some line of the batch is padded.

    transformers looks whether the attention mask is all ones, and then does without it. A fake tensor cannot answer;
    in the measured jobs it never is: the lines of a batch are padded to the longest.
    """
    transformers()
    converter: Any = importlib.import_module("transformers.modeling_attn_mask_utils").AttentionMaskConverter
    looks = converter.__dict__["_ignore_causal_mask_sdpa"]
    converter._ignore_causal_mask_sdpa = staticmethod(lambda *_, **__: False)
    try:
        yield
    finally:
        converter._ignore_causal_mask_sdpa = looks


def adafactor(params: Iterable[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Returns transformers' Adafactor as the jobs made it: with the given rate, scaled by each parameter's size."""
    transformers()
    original: Any = importlib.import_module("transformers.optimization").Adafactor

    class Ours(original):
        """The same, but the larger of two numbers is taken as a tensor: a fake one cannot be compared."""

        @staticmethod
        def _get_lr(group: dict[str, Any], state: dict[str, Any]) -> Any:
            return group["lr"] * state["RMS"].clamp(min=group["eps"][1])

    optimizer: torch.optim.Optimizer = Ours(params, lr=lr, relative_step=False)
    return optimizer
