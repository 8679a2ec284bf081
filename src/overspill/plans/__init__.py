"""Make checked plans for a graph, and compare policies and budgets."""
