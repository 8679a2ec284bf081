"""What `overspill estimate` asks of this package."""
