"""Tools that policies of papers share, besides those of all policies."""
