"""Show plans, runs and devices in terminals, files and web pages.

Functions from results to things that rich prints.
"""
