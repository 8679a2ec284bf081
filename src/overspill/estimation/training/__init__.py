"""Ways to train, applied to a model as programs do it.

One file each.
"""
