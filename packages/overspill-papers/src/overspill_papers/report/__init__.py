"""The papers' figures and ours, for a terminal."""
