"""PyTorch's logs."""

import torch._logging

set_logs = torch._logging.set_logs
"""Set the level of each of PyTorch's own loggers."""
