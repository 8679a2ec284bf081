"""Causal masks that a model makes itself: nn.TransformerEncoder asks of its mask's values whether it is one.

While a step is captured there are no values. Of a mask that `nn.Transformer.generate_square_subsequent_mask` has made the
answer is known; of any other it is not, and the model has to say it (`is_causal=`).

Names private to PyTorch that this file relies on (2.11 to 2.13): `_generate_square_subsequent_mask` and
`_detect_is_causal_mask` of torch.nn.modules.transformer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.modules import transformer


@contextmanager
def causal_masks_known() -> Iterator[None]:
    """While this lasts, masks that PyTorch makes causal are taken as causal without a look at their values."""
    make, detect = transformer._generate_square_subsequent_mask, transformer._detect_is_causal_mask
    made: list[Tensor] = []

    def noted(*args: Any, **kwargs: Any) -> Tensor:
        made.append(make(*args, **kwargs))
        return made[-1]

    def detected(mask: Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
        if is_causal is None and any(mask is one for one in made):
            return True
        known: bool = detect(mask, is_causal, size)
        return known

    transformer._generate_square_subsequent_mask, transformer._detect_is_causal_mask = noted, detected
    try:
        yield
    finally:
        transformer._generate_square_subsequent_mask, transformer._detect_is_causal_mask = make, detect
