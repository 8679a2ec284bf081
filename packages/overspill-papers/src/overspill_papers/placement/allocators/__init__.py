"""Allocators of other frameworks and of papers, one file each; their native counterparts are in native/allocators/."""
