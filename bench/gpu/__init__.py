"""The experiments of the GPU campaign: what they are (`catalogue.py`), how one runs, and a file a topic."""
