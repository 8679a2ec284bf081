"""A training step of TensorFlow: its graph, as its executor runs it.

The graph is traced by an installed TensorFlow or stored.
"""
