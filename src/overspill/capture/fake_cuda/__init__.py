"""CUDA's ops on fake CPU tensors: kernels, shapes, autocast, workspaces."""
