"""Commands run as in the tests of `overspill`'s own."""

from tests.cli.conftest import overspill, own_place  # noqa: F401
