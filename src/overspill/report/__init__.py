"""Show plans, runs and devices in terminals, files and web pages.

The functions convert results to renderables of rich.
"""
