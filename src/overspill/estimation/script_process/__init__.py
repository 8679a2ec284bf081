"""A process in which a script runs without lasting changes to files.

The modules start it, limit its changes, and end it.
"""
