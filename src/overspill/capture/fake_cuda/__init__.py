"""What CUDA would run, on fake CPU tensors: ops, shapes, autocast, workspaces."""
