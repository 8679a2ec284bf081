"""A virtual GPU: run ordinary PyTorch programs on fake CUDA tensors."""
