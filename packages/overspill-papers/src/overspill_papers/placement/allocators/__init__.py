"""Allocators of other frameworks and of papers, one file each; two have counterparts in native/allocators/."""
