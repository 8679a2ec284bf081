"""Values that were never computed: known ones, assumed or placeholder values, or errors."""
