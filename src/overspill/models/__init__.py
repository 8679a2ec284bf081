"""The built-in models by name, and the user's own.

Nothing here imports torch before a model is loaded. `overspill.models.step` is separate for that reason.
"""

from .built_model import DTYPES as DTYPES
from .built_model import BuiltModel as BuiltModel
from .configuration import SHORT as SHORT
from .configuration import Quantization as Quantization
from .configuration import quantization_of as quantization_of
from .configured import FORMS as FORMS
from .optimizers import check_optimizer as check_optimizer
from .optimizers import is_eight_bit as is_eight_bit
from .optimizers import optimizer_named as optimizer_named
from .optimizers import optimizer_names as optimizer_names
from .registry import Entry as Entry
from .registry import checked_name as checked_name
from .registry import describe as describe
from .registry import load as load
from .registry import names as names
