"""Online allocators of frameworks and papers, one file each.

Each is the oracle of its native counterpart.
"""
