"""What a user could change so that a job fits: each change tried by really estimating it, those that cost least first."""

from .change import Advice as Advice
from .change import Price as Price
from .change import Retrace as Retrace
from .trials import SHOWN as SHOWN
from .trials import advice as advice
