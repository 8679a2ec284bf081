"""A process in which a script runs without leaving a trace: who starts it, what it may change, how it ends."""
