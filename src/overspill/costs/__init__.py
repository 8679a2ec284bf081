"""How long ops take on a device: estimated from the hardware, or measured where the graph has been run."""

from .op_time import MeasuredTimes as MeasuredTimes
from .op_time import op_seconds as op_seconds
from .op_time import signature as signature
