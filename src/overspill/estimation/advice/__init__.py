"""Changes with which a job would fit, cheapest first.

Each is tried by really estimating it.
"""

from .change import Advice as Advice
from .change import Price as Price
from .change import Retrace as Retrace
from .trials import SHOWN as SHOWN
from .trials import advice as advice
