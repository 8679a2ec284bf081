"""Online allocators, one file each: PyTorch's, whose rules are native, and the base of those in Python."""
