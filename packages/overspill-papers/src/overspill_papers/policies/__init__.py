"""The policies of papers, one file a paper."""
