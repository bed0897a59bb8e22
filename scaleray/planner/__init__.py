"""Needs and speed of a training on a cluster that is not there yet: arithmetic only."""
