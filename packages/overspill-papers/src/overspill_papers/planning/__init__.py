"""Tools that policies of papers share, in addition to those of all policies."""
