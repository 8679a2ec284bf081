"""Text generation with a static cache of keys and values.

The cache has its full length from the start. The recording has the prompt's step, and that of one token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from overspill.core.errors import RequestError
from overspill.pytorch.trees import tree_map_only

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Cache:
    """A static cache of each attention's keys and values.

    Its tensors, of the whole `length`, are made at the first call. They follow the StaticCache of transformers and the
    caches of gpt-fast. Each is `[batch, heads, length, width]`, for the heads of keys. Attention reads them in place.
    """

    def __init__(self, length: int) -> None:
        self._length = length
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._next = 0

    @contextmanager
    def attended(self) -> Iterator[None]:
        """Yield a context in which attention fills and reads the cache.

        A forward of the model fills it, and one of a single token reads all of it.
        """
        original = F.scaled_dot_product_attention
        self._next = 0

        def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            keys, values = self._layer(key, value)
            if query.shape[-2] > 1:
                return original(query, key, value, *args, **kwargs)
            kwargs = {**kwargs, "is_causal": False, "attn_mask": None}
            return original(query, keys, values, **kwargs)

        # Replace torch's attention for the time of the context.
        F.scaled_dot_product_attention = attend
        try:
            yield
        finally:
            F.scaled_dot_product_attention = original
        if not self._layers:
            raise RequestError(
                "the model calls no scaled_dot_product_attention, whose keys and values generate= would keep; leave it "
                "out"
            )

    def _layer(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache of the next layer, with `key` and `value` in it."""
        if self._next == len(self._layers):
            self._layers.append((_long(key, self._length), _long(value, self._length)))
        layer = self._layers[self._next]
        self._next += 1
        for whole, new in zip(layer, (key, value), strict=True):
            whole[..., : new.shape[-2], :].copy_(new)
        return layer


def _long(like: Tensor, length: int) -> Tensor:
    return like.new_zeros((*like.shape[:-2], length, like.shape[-1]))


def generated(model: nn.Module, arguments: Arguments, tokens: int) -> Tensor:
    """Return the logits of the last of `tokens` generated tokens.

    `model` generates them after the prompt in `arguments`. All tokens are alike to an allocator, since the cache has
    its full length from the start, so only one is generated. Only the prompt's last logits are computed if the model
    can leave the others out.
    """
    args, kwargs = arguments
    kwargs = {name: value for name, value in kwargs.items() if name != "labels"}
    prompt = next((leaf for leaf in (*args, *kwargs.values()) if _is_tokens(leaf)), None)
    if prompt is None:
        raise RequestError(
            "generate= needs a model that reads tokens, integers of shape (batch, length); leave it out for others"
        )
    # The cache holds prompt and text.
    length = prompt.shape[1] + tokens
    if (positions := _positions(model)) is not None and length > positions:
        raise RequestError(
            f"prompt and text are {length} tokens; the model has {positions} positions; take a smaller seq_len= or "
            "generate="
        )
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        kwargs["logits_to_keep"] = 1
    cache = Cache(length)
    with cache.attended():
        made = _last(model(*args, **kwargs))
    # One more token stands for all.
    token = made.argmax(-1, keepdim=True)
    args, kwargs = tree_map_only(Tensor, lambda leaf: token if _is_tokens(leaf) else leaf, (args, kwargs))
    with cache.attended():
        return _last(model(*args, **kwargs))


def _positions(model: nn.Module) -> int | None:
    """Return the longest text that the model can read, or None if it is unlimited or unknown."""
    found: Any = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    table: Any = getattr(model, "positions", None)
    return table.num_embeddings if found is None and isinstance(table, nn.Embedding) else found


def _is_tokens(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() == 2 and not value.is_floating_point()


def _last(output: Any) -> Tensor:
    """Return the logits of the last position."""
    found = getattr(output, "logits", output)
    found = found[0] if isinstance(found, tuple) else found
    if not isinstance(found, Tensor) or found.dim() != 3:
        raise RequestError(
            "generate= needs a model that returns logits, of shape (batch, length, vocabulary); leave it out for others"
        )
    return found[:, -1]


def forward_of(arguments: Callable[[nn.Module, Any], Arguments], tokens: int) -> Callable[[nn.Module, Any], Tensor]:
    """Return the function that an inference loop runs in place of forward.

    `arguments` makes its arguments of a batch.
    """

    def forward(model: nn.Module, inputs: Any) -> Tensor:
        with torch.no_grad():
            return generated(model, arguments(model, inputs), tokens)

    return forward
