"""The page of each result, one file a kind; `results.py` finds the one that a result has."""
