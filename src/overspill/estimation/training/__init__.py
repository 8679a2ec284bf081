"""Training methods, applied to a model as programs do it, one file each."""
