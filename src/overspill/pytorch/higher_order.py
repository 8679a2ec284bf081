"""Ops that take functions, and effects that keep ops in order."""

from __future__ import annotations

import torch._higher_order_ops.effects
import torch._higher_order_ops.utils
from torch._library.effects import EffectType as EffectType  # kinds of effects

registered_hop_fake_fns = torch._higher_order_ops.utils.registered_hop_fake_fns
"""Their fake kernels, by op."""
register_fake = torch._higher_order_ops.utils.register_fake
"""Give one a fake kernel, as a decorator."""
get_effect = torch._higher_order_ops.effects._get_effect
"""The effect of an op, or None."""
register_effectful_op = torch._higher_order_ops.effects._register_effectful_op
"""Give an op an effect."""
with_effects = torch._higher_order_ops.effects.with_effects
"""The op that calls another in the order of effects."""
