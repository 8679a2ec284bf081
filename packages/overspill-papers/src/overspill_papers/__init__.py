"""Results of papers, compared with Overspill's results.

Folders have the names of those of `overspill`.
"""
