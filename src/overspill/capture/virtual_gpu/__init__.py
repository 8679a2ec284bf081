"""Run ordinary PyTorch programs on fake CUDA tensors: a virtual GPU."""
