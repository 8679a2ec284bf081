"""Hardware figures with their sources: one TOML file per device."""

from .loader import calibrated_path as calibrated_path
from .loader import device_names as device_names
from .loader import load_device as load_device
from .loader import this_cpu as this_cpu
