"""Allocators of other frameworks and of papers, one file each."""
