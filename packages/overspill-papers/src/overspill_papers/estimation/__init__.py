"""The jobs that `overspill estimate` takes from this package."""
