"""Solvers that papers describe."""
