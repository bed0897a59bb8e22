"""Series of the metrics of a run that lives, from what its recorder hears."""
