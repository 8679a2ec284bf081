"""Meaning of a Schedule: `check` without time, `simulate` with a clock."""

from .check import CheckResult as CheckResult
from .check import check as check
from .clock import simulate as simulate
from .trace import owned_trace as owned_trace
from .trace import trace_of as trace_of
