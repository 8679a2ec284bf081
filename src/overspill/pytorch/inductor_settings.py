"""The settings of TorchInductor, which do not need all of it."""

from __future__ import annotations

import torch._inductor.config

inductor_config = torch._inductor.config
"""Its settings."""
