"""A training step of MXNet, read from its symbol file. MXNet need not be installed."""
