"""The reference machine (`check`) and the clocked machine (`simulate`): one meaning of a Schedule, without and with time."""

from .check import CheckResult as CheckResult
from .check import check as check
from .clock import simulate as simulate
from .trace import owned_trace as owned_trace
from .trace import trace_of as trace_of
