"""Changes with which a job would fit, cheapest first.

Each change is tried by estimating the changed job.
"""

from .change import CALLBACK as CALLBACK
from .change import COMPILED as COMPILED
from .change import Advice as Advice
from .change import Price as Price
from .change import Retrace as Retrace
from .trials import SHOWN as SHOWN
from .trials import Vain as Vain
from .trials import advice as advice
