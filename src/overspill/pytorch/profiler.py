"""Events of the profiler."""

from __future__ import annotations

import torch

EventType = torch._C._profiler._EventType
"""Kinds of events; Allocation is one of the allocator."""
