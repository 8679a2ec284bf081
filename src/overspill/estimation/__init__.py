"""Estimates: how much device memory a job will take, before it runs and without the device."""

from .estimate import Estimate as Estimate
from .parallel import Parallel as Parallel
from .scaling import Scaling as Scaling
