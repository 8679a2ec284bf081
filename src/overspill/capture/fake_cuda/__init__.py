"""What CUDA would run, on fake CPU tensors: op sets, shapes, lower precision, workspaces."""
