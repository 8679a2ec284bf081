"""The online allocators of frameworks and papers: one file an allocator, the oracle of its native counterpart."""
