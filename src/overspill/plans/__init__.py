"""From a graph to a plan that may be used, and every policy side by side on one graph."""
