"""The jobs that this package adds to `overspill estimate`."""
