"""Results of papers, compared with what Overspill computes.

Folders are named as those of `overspill`.
"""
