"""A process in which a script runs without leaving a trace.

Who starts it, what it may change, how it ends.
"""
