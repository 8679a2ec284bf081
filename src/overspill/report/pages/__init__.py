"""The page of each kind of result, one file each.

`results.py` finds the one that a result has.
"""
