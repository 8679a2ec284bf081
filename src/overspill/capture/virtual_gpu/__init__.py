"""A GPU that is not there: an ordinary PyTorch program runs on it, on fake tensors."""
