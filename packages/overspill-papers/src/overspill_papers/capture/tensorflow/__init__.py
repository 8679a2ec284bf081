"""A training step of TensorFlow: its graph, traced by an installed TensorFlow or stored, as its executor runs it."""
