"""A GPU that is not there: run an ordinary PyTorch program on fake CUDA tensors."""
