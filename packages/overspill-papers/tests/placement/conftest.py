"""The native core and Python, as in the tests of `overspill`'s own allocators."""

from tests.placement.conftest import native  # noqa: F401
