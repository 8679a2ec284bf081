"""The offline solvers: one file a solver."""
