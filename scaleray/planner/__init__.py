"""What a model would need, and how fast it would train, on a cluster that is not there yet: arithmetic only."""
