"""Hardware as data: one TOML file a device, each figure with its source, and the loader."""

from .loader import calibrated_path as calibrated_path
from .loader import device_names as device_names
from .loader import load_device as load_device
from .loader import this_cpu as this_cpu
