"""`overspill.compile`: forward and backward graphs of a compiled model, planned and run."""
