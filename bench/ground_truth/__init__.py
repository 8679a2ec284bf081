"""Published measurements of GPU memory, and the training jobs they were taken from, as code that runs without a GPU."""
