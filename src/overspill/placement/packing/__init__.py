"""Offline placement: every solver takes a Trace to a Layout, with a proven bound on what any layout needs."""
