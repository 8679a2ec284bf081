"""A training step of MXNet, read from its symbol file. No MXNet is needed."""
