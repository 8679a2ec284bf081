"""Allocators of other frameworks and of papers, one file each.

Two have counterparts in native/allocators/.
"""
