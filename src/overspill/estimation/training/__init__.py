"""What a job changes about a model before it is trained: each file one way to train, done as programs do it."""
