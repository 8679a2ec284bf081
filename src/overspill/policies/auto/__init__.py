"""`auto`: the cheapest mix of offload and recomputation that fits the budget."""

from .policy import Auto as Auto
