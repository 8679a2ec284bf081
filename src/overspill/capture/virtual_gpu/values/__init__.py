"""Values that were never computed: known ones, assumed or invented ones, or errors."""
