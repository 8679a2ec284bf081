"""The papers' figures beside ours, for a terminal."""
