"""A training step of MXNet, read from its symbol file: no MXNet is needed."""
