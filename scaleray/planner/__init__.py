"""Predict memory and speed of a training on a cluster that is not available yet, by arithmetic alone."""
