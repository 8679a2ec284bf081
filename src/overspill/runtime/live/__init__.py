"""An allocator for real memory, led by planned addresses."""
