"""Recordings of an eager run's device memory, and Graphs of its steps."""
