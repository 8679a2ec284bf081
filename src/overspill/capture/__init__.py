"""Capture: turn PyTorch's traced forward and backward into a Graph."""
