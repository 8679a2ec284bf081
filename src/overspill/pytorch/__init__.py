"""The wall to PyTorch: the only folder that uses its private names, one module an area.

Everything outside imports these names from here, so a new release of PyTorch is met here and nowhere else.
`tests/pytorch` and `overspill doctor` say name by name what a release has moved (`names.py`); CONTRIBUTING.md, "a new
PyTorch", says what to do then. Names hold for 2.11 and later unless a comment says more.
"""
