"""The experiments of the GPU campaign: what they are (`catalogue.py`), how they are run, what is written of them,
and what follows.
"""
